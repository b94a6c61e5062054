"""Drafters that run a network once per position, with random weights: outputs, and drafts against the naive twin."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters.model_based.autoregressive import AutoregressiveDrafter, Growth
from engine.drafters.model_based.slots import SlotWriter
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.sampling.draft_sampler import DraftSampler
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from ssd.baselines.none import NoDrafter
from tests.engine.drafters.heads import HEADS, make_head, naive_logits

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=13, page_size=16, kv_memory_mib=1)
TOLERANCE = 2e-3


def requests(temperature, count=8):
    """Prompts with shared prefixes, some longer than a chunk, and settings that change the distribution."""
    rng = np.random.default_rng(2)
    stem = rng.integers(1, 60, 70)
    submitted = []
    for index in range(count):
        prompt = np.concatenate((stem[: 16 * rng.integers(0, 5)], rng.integers(1, 60, rng.integers(1, 40))))
        sampling = SamplingParams(
            max_tokens=24,
            temperature=temperature,
            seed=index,
            top_k=int(rng.choice([0, 8])),
            repetition_penalty=float(rng.choice([1.0, 1.3])),
            ignore_eos=True,
        )
        submitted.append(Request(prompt.astype(np.uint32), sampling))
    return submitted


class Recorder:
    """Records the logits from which draft tokens are sampled."""

    def __init__(self, monkeypatch):
        self.calls = []
        self._paths = []
        self._sample, self._expand = DraftSampler.sample, Growth.expand
        monkeypatch.setattr(DraftSampler, "sample", lambda sampler, *inputs: self.sample(sampler, *inputs))
        monkeypatch.setattr(Growth, "expand", lambda growth, depth: self.expand(growth, depth))

    def expand(self, growth, depth):
        self._paths = [growth.pool.path_to(node) for node in growth._frontier.node.tolist()]
        self._expand(growth, depth)
        self._paths = []

    def sample(self, sampler, logits, owner, *rest):
        # Medusa heads, which run beside others in some tests, are not recorded.
        for own, path, row in zip(owner.tolist(), self._paths, logits, strict=False):
            self.calls.append((sampler._sequences[own].tokens.copy(), path, row.clone()))
        return self._sample(sampler, logits, owner, *rest)

    def largest_difference(self, head, target, count=60):
        """Largest relative difference between recorded logits and those of the naive twin, for some of the calls."""
        differences = []
        for text, path, row in self.calls[:: max(1, len(self.calls) // count)]:
            expected = naive_logits(head, target, text, path)[-1]
            found = row if head.draft_vocabulary is None else row[head.draft_vocabulary]
            differences.append(float((expected - found).abs().max() / expected.abs().max()))
        return max(differences)


def run(model, config, submitted, kind, *, pages=None, has_trees=False, depth=4):
    head = make_head(kind, model)
    drafter = AutoregressiveDrafter(head, depth=depth, has_trees=has_trees, source=DraftSource.DRAFT_MODEL)
    engine = build_engine(model, config, drafter)
    if pages is not None:
        engine.scheduler = Scheduler(config, PagePool(pages, config.page_size))
    completions = engine.generate(submitted)
    engine.scheduler.check_integrity()
    return head, engine, completions


def tokens_of(completions):
    return [each.tokens.tolist() for each in completions]


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", HEADS)
def test_exact_outputs_equal_plain_decoding(model, monkeypatch, kind, temperature, has_trees):
    recorder = Recorder(monkeypatch)
    submitted = requests(temperature)
    config = replace(CONFIG, draft_shape="tree" if has_trees else "path")
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    head, _, completions = run(model, config, submitted, kind, has_trees=has_trees)
    assert tokens_of(completions) == tokens_of(plain)
    assert sum(each.drafted for each in completions) > 100
    assert sum(each.accepted for each in completions) > 0 or temperature == 0
    assert any(each.cached_tokens for each in completions)
    assert max(len(path) for _, path, _ in recorder.calls) == 3
    assert recorder.largest_difference(head, model) < TOLERANCE


@pytest.mark.parametrize("kind", HEADS)
def test_slots_survive_preemption(model, monkeypatch, kind):
    """Preempted sequences find their own and others' pages in the prefix cache when they continue."""
    recorder = Recorder(monkeypatch)
    submitted = requests(0.8)
    config = replace(CONFIG, watermark=0.0)
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    head, engine, completions = run(model, config, submitted, kind, pages=9)
    assert engine.scheduler.preemptions > 0
    assert tokens_of(completions) == tokens_of(plain)
    assert recorder.largest_difference(head, model) < TOLERANCE


@pytest.mark.parametrize("has_trees", [False, True])
@pytest.mark.parametrize("kind", ["mtp", "draft-model"])
def test_only_paths_are_verified_by_rejection(model, monkeypatch, kind, has_trees):
    recorder = Recorder(monkeypatch)
    config = replace(CONFIG, draft_shape="tree" if has_trees else "path", verification="rejection")
    head, _, completions = run(model, config, requests(0.8), kind, has_trees=has_trees)
    plain = build_engine(model, config, NoDrafter()).generate(requests(0.8))
    assert (tokens_of(completions) == tokens_of(plain)) == has_trees
    assert 0 < sum(each.accepted for each in completions) < sum(each.drafted for each in completions)
    assert recorder.largest_difference(head, model) < TOLERANCE


@pytest.mark.parametrize("has_trees", [False, True])
def test_drafts_are_shorter_at_the_end_of_the_context_window(model, has_trees):
    window = model.config.max_positions
    rng = np.random.default_rng(4)
    submitted = [
        Request(rng.integers(1, 60, window - left).astype(np.uint32), SamplingParams(max_tokens=left, ignore_eos=True))
        for left in (1, 2, 3, 5, 9)
    ]
    config = replace(CONFIG, draft_shape="tree" if has_trees else "path")
    plain = build_engine(model, config, NoDrafter()).generate(submitted)
    _, _, completions = run(model, config, submitted, "self", has_trees=has_trees)
    assert tokens_of(completions) == tokens_of(plain)
    # A step with a draft of k tokens produces k + 1, so that nothing is drafted for the last token.
    assert [each.drafted > 0 for each in completions] == [False, False, True, True, True]


def test_a_copy_of_the_target_is_always_accepted(model):
    """With the target's noise and keys, every draft token of a path equals the target's token."""
    _, _, completions = run(model, CONFIG, requests(0.8), "self")
    assert sum(each.accepted for each in completions) > 0.95 * sum(each.drafted for each in completions)


def test_slots_of_accepted_draft_tokens_are_not_computed_again(model, monkeypatch):
    """A draft model runs each committed token once if its drafts are accepted, except the last one of a draft."""
    ran = []
    write = SlotWriter._write

    def counting(writer, spans):
        ran.append(sum(span.end - span.slots.filled for span in spans))
        return write(writer, spans)

    monkeypatch.setattr(SlotWriter, "_write", counting)
    torch.manual_seed(1)
    head = HEADS["draft-model"](model)
    head.model = model
    head.config, head.num_layers = model.config, model.config.num_layers
    drafter = AutoregressiveDrafter(head, depth=4, has_trees=False, source=DraftSource.DRAFT_MODEL)
    submitted = [Request(np.arange(1, 9, dtype=np.uint32), SamplingParams(max_tokens=30, ignore_eos=True))]
    completions = build_engine(model, CONFIG, drafter).generate(submitted)
    assert completions[0].accepted > 0.9 * completions[0].drafted > 10
    assert ran[0] == 9  # the prompt and the first token
    assert max(ran[1:]) == 2  # the last draft token, which was not run before, and the bonus token


def of_the_same_position(monkeypatch):
    """Planted fault: pair token t with the hidden state of t instead of t - 1."""
    keep = SlotWriter._keep_states

    def shifted(writer, sequences, computed, hidden, offsets):
        parts = [hidden[first:end].roll(-1, dims=0) for first, end in pairwise(offsets.tolist())]
        keep(writer, sequences, computed, torch.cat(parts), offsets)

    monkeypatch.setattr(SlotWriter, "_keep_states", shifted)


def without_page_states(monkeypatch):
    """Planted fault: after a prefix-cache hit, the preceding hidden state is missing."""
    restarted = SlotWriter._restarted

    def missing(writer, sequence, start):
        writer.states.zero_()
        return restarted(writer, sequence, start)

    monkeypatch.setattr(SlotWriter, "_restarted", missing)


@pytest.mark.parametrize("fault", [of_the_same_position, without_page_states])
def test_planted_faults_are_caught(model, monkeypatch, fault):
    recorder = Recorder(monkeypatch)
    fault(monkeypatch)
    head, _, _ = run(model, CONFIG, requests(0.8), "mtp")
    assert recorder.largest_difference(head, model) > 10 * TOLERANCE
