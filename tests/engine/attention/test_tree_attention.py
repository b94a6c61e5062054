"""Draft trees on a real model: attention, keys and values of accepted paths, and outputs.

Keys of a tree are stored in a different order than those of a path, so sums are rounded differently. Logits, and keys
and values above the first layer, are compared within a tolerance, and outputs only where rounding does not matter.
"""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.commands.prompts import read_texts
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.draft_tree import DraftTree
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from tests.engine.conftest import VOCAB
from tests.engine.forward import PAGE_SIZE, cached_and_fresh, new_runner, prompt_logits, sequence_of
from tests.engine.steps import batch_of
from tests.engine.trees import RandomTrees, random_tree

TEXT = np.random.default_rng(0).integers(1, VOCAB, 300).astype(np.uint32)
LARGEST_DIFFERENCE = 1e-4
"""Largest difference of log-probabilities in nats that docs/api.md states; 1.8e-5 was measured."""
CONFIG = EngineConfig(max_sequences=8, max_step_tokens=256, max_draft=9, draft_shape="tree", watermark=0.0)


def requests(count, **settings):
    rng = np.random.default_rng(3)
    stem = rng.integers(1, 60, 60)
    return [
        Request(
            np.concatenate([stem[: rng.integers(0, 61)], rng.integers(1, 60, rng.integers(1, 60))]).astype(np.uint32),
            SamplingParams(seed=seed, **{"max_tokens": 32, **settings}),
        )
        for seed in range(count)
    ]


def alone(model, submitted):
    engine = build_engine(model, EngineConfig(max_sequences=1, max_draft=0), NoDrafter())
    apart = [replace(request, salt=f"{number}") for number, request in enumerate(submitted)]  # They share no pages.
    return [engine.generate([request])[0].tokens.tolist() for request in apart]


def path_to(node, parents):
    """Return the nodes from the first token of a draft to a node; none for -1."""
    return [] if node < 0 else [*path_to(parents[node], parents), node]


@settings(max_examples=20)
@given(st.data())
def test_logits_of_a_tree_equal_those_of_its_paths(model, data):
    """The tree follows a whole prompt or its last chunk, across blocks of keys, on shuffled pages."""
    length = data.draw(st.sampled_from([1, 20, 119, 125, 128]), "length")
    computed = data.draw(st.integers(0, length - 1), "computed")
    rng = np.random.default_rng(data.draw(st.integers(0, 1000), "seed"))
    tokens, parents = random_tree(rng, TEXT[length:], 10, VOCAB)
    pages = rng.permutation(32)
    runner = new_runner(model, 33)
    if computed:
        runner.forward(batch_of([sequence_of(TEXT[:computed], pages)], PAGE_SIZE))
    sequence = sequence_of(TEXT[:length], pages, computed=computed, draft=tokens)
    sequence.tree = DraftTree(np.array(parents, np.int32))
    logits = runner.forward(batch_of([sequence, sequence_of(TEXT[:3], [32])], PAGE_SIZE))
    for node in range(-1, len(tokens)):
        path = [tokens[at] for at in path_to(node, parents)]
        expected = prompt_logits(model, np.array([*TEXT[:length], *path], np.uint32))[-1]
        assert (logits[node + 1] - expected).abs().max() < 2e-4


PENALIZED = {"temperature": 0.7, "frequency_penalty": 0.7, "repetition_penalty": 1.2}


@pytest.mark.parametrize(
    ("sampling", "pages"), [({}, 14), (PENALIZED, None)], ids=["greedy, scarce pages", "penalized"]
)
def test_random_trees_do_not_change_outputs(model, sampling, pages):
    submitted = requests(8, **sampling)
    expected = alone(model, submitted)
    engine = build_engine(model, CONFIG, RandomTrees(submitted, expected, VOCAB))
    pool = engine.scheduler.pages
    if pages is not None:
        pool.allocate(pool.count - pages)
    free = pool.free_count
    completions = engine.generate(submitted)
    assert [completion.tokens.tolist() for completion in completions] == expected
    assert pool.free_count == free
    assert sum(completion.steps for completion in completions) < 0.6 * sum(map(len, expected))
    assert bool(engine.scheduler.preemptions) == (pages is not None)
    assert sum(completion.cached_tokens for completion in completions) > 0


def test_trees_of_the_suffix_drafter_do_not_change_outputs(model):
    submitted = requests(8, temperature=1.0)
    expected = alone(model, submitted)
    with SuffixDrafter(DrafterConfig(capacity=10_000, draft_shape="tree", max_draft=9, cost=0.001)) as drafter:
        engine = build_engine(model, CONFIG, drafter)
        completions = [*engine.generate(submitted), *engine.generate(submitted)]
        assert [completion.tokens.tolist() for completion in completions] == 2 * expected
        # The drafter determines the accepted path itself.
        assert drafter.stats.verified == sum(completion.drafted for completion in completions)
        assert drafter.stats.accepted == sum(completion.accepted for completion in completions) > 0


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_log_probabilities_in_a_tree_differ_by_rounding_from_those_of_tokens_decoded_alone():
    """If all nodes before a node are its ancestors, keys are in the order of a path, and all bits are equal."""
    shipped, pages = pack(load_model(SHIPPED_MODEL)), range(20)
    text = Tokenizer(SHIPPED_MODEL).encode("\n".join(read_texts(SHIPPED_MODEL / "prompts.jsonl")[:4]))
    vocab, rng, kinds = shipped.config.vocab_size, np.random.default_rng(0), set()
    for length in (40, 127):
        tokens, parents = random_tree(rng, text[length:], 14, vocab)
        runner = new_runner(shipped, 20)
        tree = sequence_of(text[:length], pages, draft=tokens, tree=DraftTree(np.array(parents, np.int32)))
        found = runner.forward(batch_of([tree], PAGE_SIZE)).log_softmax(-1)
        runner = new_runner(shipped, 20)
        runner.forward(batch_of([sequence_of(text[:length], pages)], PAGE_SIZE))
        for node in range(len(tokens)):
            path = path_to(node, parents)
            committed = text[:length]
            for at in path:
                committed = np.append(committed, np.uint32(tokens[at]))
                alone = sequence_of(committed, pages, computed=len(committed) - 1)
                expected = runner.forward(batch_of([alone], PAGE_SIZE)).log_softmax(-1)[0]
            is_path = path == list(range(node + 1))
            kinds.add(is_path)
            difference = float((found[node + 1] - expected).abs().max())
            assert difference <= (0 if is_path else LARGEST_DIFFERENCE)
    assert kinds == {True, False}


def test_keys_and_values_of_accepted_paths_equal_recomputed_ones(model_folder):
    """With packed weights, rounding does not depend on the step."""
    model = pack(load_model(model_folder))
    submitted = requests(10)
    expected = alone(model, submitted)
    engine = build_engine(model, CONFIG, RandomTrees(submitted, expected, VOCAB))
    engine.generate(submitted)
    pages = [
        page
        for request, answer in zip(submitted, expected, strict=True)
        for page in cached_and_fresh(model, engine, np.array([*request.prompt, *answer], np.uint32))
    ]
    assert len(pages) > 30
    for cached, fresh in pages:
        if torch.backends.mkldnn.is_available():
            # The first layer's do not depend on attention.
            assert torch.equal(cached[:, 0], fresh[:, 0])
        assert torch.allclose(cached, fresh, rtol=0, atol=1e-4)
