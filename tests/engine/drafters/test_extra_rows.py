"""Rows that a drafter adds to the target's batch: what it gets back for them, and that they change nothing else."""

from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.drafts import ExtraRows
from engine.drafters.tokens import TokenDrafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from engine.speculation.draft_tree import DraftTree
from ssd.baselines.none import NoDrafter
from tests.engine.chain import VOCAB, chain_engine, contents, scores
from tests.engine.forward import new_runner, prompt_logits, sequence_of
from tests.engine.steps import batch_of, each_of
from tests.engine.trees import batch_of_trees, random_tree
from tests.engine.workload import Workload
from tests.replay import branches

ROWS = 6


class WithExtraRows(Drafter):
    """Adds random extra rows to the drafts of a drafter, and checks the tokens that come back for them."""

    def __init__(self, drafter, expect, vocab=VOCAB):
        """expect: returns the target's most likely token after a text."""
        self.inner = TokenDrafter(drafter)
        self.needs = TargetOutputs(extra_rows=ROWS)
        self.rng = np.random.default_rng(5)
        self.expect, self.vocab = expect, vocab
        self.texts = {}
        self.seen = Counter()

    def start(self, sequence):
        self.inner.start(sequence)

    def propose(self, plan):
        trees = [random_tree(self.rng, [], room, self.vocab) for room in plan.extra_rooms.tolist()]
        for sequence, room in zip(plan.producing, plan.extra_rooms.tolist(), strict=True):
            self.texts[sequence.sequence_id] = sequence.tokens.tolist()
            self.seen[f"{room} rows"] += 1
        rows = batch_of_trees(trees)
        return replace(self.inner.propose(plan), extra=ExtraRows(rows.tokens, rows.parents, rows.offsets))

    def observe(self, result):
        self.inner.observe(result)
        extra = result.plan.drafts.extra
        assert len(result.extra_tokens) == (0 if extra is None else len(extra.tokens))
        for index, each in enumerate(each_of(result) if extra is not None else ()):
            own = slice(*extra.offsets[index : index + 2].tolist())
            paths = branches(extra.tokens[own].tolist(), extra.parents[own].tolist())
            for path, token in zip(paths, each.extra_tokens.tolist(), strict=True):
                assert token == self.expect([*self.texts[each.sequence_id], *path])
                self.seen["checked"] += 1

    def finish(self, sequence, learn):
        self.inner.finish(sequence, learn)

    def close(self):
        self.inner.close()


def test_random_workloads_with_extra_rows():
    """The cache of the chain model depends on every slot, so a misplaced or attended extra row changes outputs."""
    seen = Counter()
    for seed in range(12):
        shape, has_backoff = "tree" if seed % 2 else "path", seed % 4 > 1
        workload = Workload(300 + seed, shape, has_backoff, wrap=partial(WithExtraRows, expect=chain_token))
        workload.run(40)
        seen += workload.seen + workload.engine._speculation.drafter.inner.seen
    for what in ("finished", "accepted", "rejected", "cached", "preempted", "checked", "0 rows", "2 rows", "6 rows"):
        assert seen[what] >= 20, seen


def chain_token(text):
    """The most likely token of the chain model, which may be its end token."""
    logits = scores(sum(contents(text)))
    return logits.index(max(logits))


def requests(count, **settings):
    rng = np.random.default_rng(1)
    sampling = {"max_tokens": 24, **settings}
    prompts = [rng.integers(1, 60, rng.integers(1, 140)).astype(np.uint32) for _ in range(count)]
    return [Request(prompt, SamplingParams(seed=seed, **sampling)) for seed, prompt in enumerate(prompts)]


@pytest.mark.parametrize(
    "sampling",
    [{}, {"temperature": 1.0, "logprobs": 1, "prompt_logprobs": 1}, {"temperature": 0.7, "repetition_penalty": 1.3}],
    ids=["greedy", "logprobs", "penalized"],
)
def test_extra_rows_do_not_change_outputs(model, sampling):
    config, submitted = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=4), requests(6, **sampling)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)

    def expect(text):
        return int(prompt_logits(model, np.array(text, np.uint32))[-1].argmax())

    drafter = WithExtraRows(NoDrafter(), vocab=model.config.vocab_size, expect=expect)
    completions = build_engine(model, replace(config, in_flight=1), drafter).generate(submitted)
    assert drafter.seen["checked"] > 100
    for found, expected in zip(completions, plain, strict=True):
        assert found.tokens.tolist() == expected.tokens.tolist()
        if sampling.get("logprobs"):
            np.testing.assert_allclose(found.logprobs.tokens, expected.logprobs.tokens, atol=1e-4)
            np.testing.assert_allclose(found.prompt_logprobs.tokens, expected.prompt_logprobs.tokens, atol=1e-4)


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
def test_logits_of_a_path_are_bitwise_the_same_with_extra_rows(model_folder):
    """Across the border of a block of keys as well."""
    model, text = pack(load_model(model_folder)), np.random.default_rng(0).integers(1, 300, 140).astype(np.uint32)
    for length in (100, 125):
        logits = []
        for extra in (0, 20):
            entry = sequence_of(text[:length], range(32), draft=text[length : length + 4])
            if extra:
                entry.extra = text[:extra]
                entry.extra_tree = DraftTree(np.arange(-1, extra - 1, dtype=np.int32) // 2)
            logits.append(new_runner(model, 32).forward(batch_of([entry], 16))[:5])
        assert torch.equal(*logits)


def rooms_of(config, pages, submitted, extra_rows=ROWS):
    """Extra room of the first step in which all requests decode."""
    engine = chain_engine(config, pages, NoDrafter())
    engine.scheduler = Scheduler(config, engine.scheduler.pages, extra_rows)
    for request in submitted:
        engine.add(request)
    engine.step()
    plan = engine.scheduler.plan()
    return list(zip(plan.rooms.tolist(), plan.extra_rooms.tolist(), strict=True))


def chain_requests(count, max_tokens=6, **given):
    sampling = SamplingParams(max_tokens=max_tokens)
    return [Request(np.array([3, 1, 4], np.uint32), sampling, **given) for _ in range(count)]


def test_the_room_of_extra_rows_is_what_steps_and_pages_leave():
    config = EngineConfig(max_sequences=4, max_draft=3, max_step_tokens=64, watermark=0.0)
    assert rooms_of(config, 40, chain_requests(2)) == [(3, ROWS)] * 2
    # 4 + 3 tokens of each sequence leave 28 - 16 tokens to four sequences.
    assert rooms_of(replace(config, max_step_tokens=28), 40, chain_requests(4)) == [(3, 3)] * 4
    assert rooms_of(config, 40, chain_requests(2, max_draft=0)) == [(0, 0)] * 2
    # Two texts with drafts take 7 slots each, in two pages of four; a fifth page is free.
    assert rooms_of(config, 5, chain_requests(2)) == [(3, 5), (3, 1)]


def test_extra_rows_may_lie_beyond_the_maximum_length():
    config = EngineConfig(max_sequences=1, max_draft=3, watermark=0.0)
    assert rooms_of(config, 40, chain_requests(1, max_tokens=4)) == [(2, ROWS)]
