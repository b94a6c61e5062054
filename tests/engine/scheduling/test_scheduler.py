"""Random workloads compared with single requests, and tests of the scheduler's rules."""

from collections import Counter

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from tests.engine.chain import PAGE_SIZE, VOCAB, answer, chain_engine
from tests.engine.workload import Workload
from tests.strategies import assert_covered, examples

WORKLOADS = examples(20).max_examples


@pytest.mark.parametrize(
    ("block", "shape", "has_backoff", "in_flight"),
    [
        (0, "path", False, None),
        (1, "path", True, None),
        (2, "tree", False, None),
        (3, "path", False, 0),
        (4, "path", False, 1),
        (5, "path", False, "any"),
        (6, "path", True, "any"),
    ],
)
def test_random_workloads_give_the_outputs_of_single_requests(block, shape, has_backoff, in_flight):
    seen = Counter()
    for seed in range(block * WORKLOADS, (block + 1) * WORKLOADS):
        workload = Workload(seed, shape, has_backoff, in_flight)
        workload.run()
        seen += workload.seen
    frequent = (
        "finished", "cancelled", "accepted", "rejected", "cached", "preempted", "not drafted", "scored", "recorded",
    )  # fmt: skip
    assert_covered(seen, frequent, WORKLOADS)
    assert_covered(seen, ("cancelled after preemption", "cancelled too late", "refused"), 1)


def text(length, seed=0):
    return np.random.default_rng(seed).integers(1, VOCAB, length).astype(np.uint32)


def engine_of(pages=24, **settings):
    fields = {"max_sequences": 8, "max_draft": 0, "max_step_tokens": 64}
    return chain_engine(EngineConfig(**{**fields, **settings}), pages, NoDrafter())


def test_drafts_do_not_cause_preemptions():
    """If all sequences fit without drafts, none is preempted with drafts."""
    prompts = [text(4 * PAGE_SIZE, seed) for seed in range(4)]
    submitted = [Request(prompt, SamplingParams(max_tokens=PAGE_SIZE)) for prompt in prompts]
    engine = engine_of(pages=4 * 5 + 1, max_draft=8, max_sequences=4)
    completions = engine.generate(submitted)
    assert engine.scheduler.preemptions == 0
    assert [c.tokens.tolist() for c in completions] == [answer(p, PAGE_SIZE) for p in prompts]


def test_drafts_leave_the_watermark_free():
    engine = engine_of(pages=10, watermark=0.5, max_draft=16, max_sequences=1)
    engine.add(Request(text(4 * PAGE_SIZE), SamplingParams(max_tokens=20)))
    plan = engine.scheduler.plan()
    assert engine.scheduler.pages.free_count == 5
    assert plan.rooms.tolist() == [PAGE_SIZE]  # four pages were wanted, and six were free


def test_pages_that_a_running_prompt_needs_are_reserved():
    """A prompt of 20 pages has 4 of 24 so far; another prompt of 10 pages would fit now, but not later."""
    engine = engine_of(pages=24, max_sequences=2, max_step_tokens=4 * PAGE_SIZE)
    first = engine.add(Request(text(20 * PAGE_SIZE - 1), SamplingParams(max_tokens=1)))
    engine.step()
    assert engine.scheduler.pages.free_count == 20
    engine.add(Request(text(10 * PAGE_SIZE, 1), SamplingParams(max_tokens=1)))
    ended = []
    while engine.scheduler.has_work:
        engine.scheduler.plan()
        assert [sequence.sequence_id for sequence in engine.scheduler.running] == [first if not ended else first + 1]
        ended += engine.step().finished
    assert ended == [first, first + 1]
    assert engine.scheduler.preemptions == 0


@pytest.mark.parametrize(
    ("step_tokens", "length", "ends"),
    [
        (10, 23, [8, 16, 23]),
        (10, 10, [10]),
        (10, 11, [8, 11]),
        (4, 8, [4, 8]),
        (3, 11, [3, 4, 7, 8, 11]),
    ],
)
def test_prompt_chunks_end_at_page_boundaries(step_tokens, length, ends):
    engine = engine_of(max_sequences=1, max_step_tokens=step_tokens)
    engine.add(Request(text(length), SamplingParams(max_tokens=2)))
    [sequence] = engine.scheduler.waiting
    computed = []
    for _ in ends:
        engine.step()
        computed.append(sequence.computed)
    assert computed == ends


def test_a_shared_prefix_is_computed_once():
    """Requests that arrive together, chunked prompts, and later requests share the prefix."""
    stem = text(40)
    submitted = [Request(np.concatenate([stem, text(3, seed)]), SamplingParams(max_tokens=2)) for seed in range(1, 6)]
    engine = engine_of(pages=60, max_step_tokens=24)
    computed = []
    forward = engine._executor.runner.forward
    engine._executor.runner.forward = lambda batch: (computed.append(len(batch.tokens)), forward(batch))[1]
    first, *others = engine.generate(submitted)
    assert first.cached_tokens == 0
    assert [completion.cached_tokens for completion in others] == [40] * 4
    assert sum(computed) == 40 + 5 * (3 + 1)
    again = engine.generate(submitted)
    assert [completion.cached_tokens for completion in again] == [40] * 5


def test_the_last_page_of_a_cached_prompt_is_computed_again():
    engine = engine_of()
    request = Request(text(5 * PAGE_SIZE), SamplingParams(max_tokens=3))
    [first] = engine.generate([request])
    [second] = engine.generate([request])
    assert second.cached_tokens == 4 * PAGE_SIZE
    assert second.tokens.tolist() == first.tokens.tolist()


def test_nothing_is_shared_across_salts():
    engine = engine_of()
    engine.generate([Request(text(20), SamplingParams(max_tokens=1))])
    [completion] = engine.generate([Request(text(20), SamplingParams(max_tokens=1), salt="other")])
    assert completion.cached_tokens == 0


def test_shared_pages_allow_more_running_sequences():
    """Eight prompts of ten pages run on 24 pages: with the prefix cached, each only needs one or two own pages."""
    engine = engine_of(max_step_tokens=64)
    stem = text(36)
    engine.generate([Request(stem, SamplingParams(max_tokens=1))])
    running = []
    engine.generate(
        [Request(np.concatenate([stem, text(2, seed)]), SamplingParams(max_tokens=3)) for seed in range(8)],
        observe=lambda _: running.append(len(engine.scheduler.running)),
    )
    assert max(running) >= 6


def test_long_prompts_do_not_delay_decoding():
    engine = engine_of(pages=200, max_sequences=4, max_step_tokens=8)
    short = engine.add(Request(text(3), SamplingParams(max_tokens=12)))
    engine.step()
    for seed in range(3):
        engine.add(Request(text(80, seed), SamplingParams(max_tokens=4)))
    expected = answer(text(3), 12)
    for _ in range(len(expected) - 1):
        assert short in engine.step().tokens


def test_requests_finish_in_about_the_order_of_arrival():
    """When pages are scarce, an old request ends before those that arrived much later."""
    engine = engine_of(pages=22, max_step_tokens=16)
    order, ids = [], []
    for seed in range(60):
        ids.append(engine.add(Request(text(1 + seed * 7 % 60, seed), SamplingParams(max_tokens=1 + seed % 20))))
        order += engine.step().finished
    while engine.scheduler.has_work:
        order += engine.step().finished
    assert sorted(order) == ids
    assert engine.scheduler.preemptions
    assert all(abs(order.index(sequence_id) - sequence_id) <= 8 for sequence_id in ids)
