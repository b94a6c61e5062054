"""Requests that wait for their adapter are passed by others, and do not wait forever."""

from concurrent.futures import Executor, Future
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from torch import nn

from engine.config import EngineConfig
from engine.models.lora.format import Adapter
from engine.models.lora.pool import AdapterPool
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.chain import VOCAB, answer, chain_engine

NAMES = "abcde"


class FakePool:
    """Replaces `AdapterPool`. The adapters in `loaded`, which the test sets, are in memory."""

    names = NAMES

    def __init__(self, loaded=()):
        self.loaded = set(loaded)
        self.calls = []
        """Arguments of each call of `prepare`."""
        self.running = []
        self.damaged = set()

    def prepare(self, name, waiting):
        self.calls.append((name, set(waiting)))
        if name in self.damaged:
            raise UserError("damaged")
        return name in self.loaded

    def wait(self):
        self.loaded = set(NAMES)

    def acquire(self, name):
        assert name in self.loaded
        self.running.append(name)

    def release(self, name):
        self.running.remove(name)


class NoUpdates(Adapter):
    """An adapter that changes no layer."""

    def read(self):
        return {}


class Immediate(Executor):
    """Replaces the thread that reads adapters."""

    def submit(self, read):
        future = Future()
        future.set_result(read())
        return future


def pool_of(size):
    """The engine's own pool, without weights and threads."""
    adapters = {name: NoUpdates(name, Path(name), {}, {}) for name in NAMES}
    pool = AdapterPool(SimpleNamespace(embedding=nn.Embedding(1, 1)), adapters, size)
    pool._reader = Immediate()
    return pool


def text(length, seed=0):
    return np.random.default_rng(seed).integers(1, VOCAB, length).astype(np.uint32)


def engine_of(pool, pages=24, **settings):
    config = EngineConfig(**{"max_sequences": 4, "max_draft": 0, "max_step_tokens": 64, **settings})
    return chain_engine(config, pages, NoDrafter(), adapters=pool)


def add(engine, adapter, length=4, max_tokens=12, seed=0):
    return engine.add(Request(text(length, seed), SamplingParams(max_tokens=max_tokens), adapter=adapter))


def ids(sequences):
    return [sequence.sequence_id for sequence in sequences]


def test_later_requests_pass_one_whose_adapter_is_not_in_memory():
    pool = FakePool("a")
    engine = engine_of(pool)
    for adapter in ("a", "b", "b", None, "c", "a"):
        add(engine, adapter)
    engine.step()
    assert ids(engine.scheduler.running) == [0, 3, 5]
    assert ids(engine.scheduler.waiting) == [1, 2, 4]
    assert pool.calls == [("a", set()), ("b", set()), ("c", {"b"}), ("a", {"b", "c"})]
    pool.loaded.add("b")
    engine.step()
    assert ids(engine.scheduler.running) == [0, 1, 3, 5]  # in the order of arrival, up to the limit
    engine.scheduler.check_integrity()
    while engine.scheduler.has_work:
        engine.step()
    assert pool.running == []


def test_a_request_that_lacks_pages_is_not_passed():
    engine = engine_of(FakePool("ab"), pages=12)
    for adapter, length in ((None, 20), ("b", 32), (None, 4), ("a", 4)):
        add(engine, adapter, length)
    engine.step()
    assert ids(engine.scheduler.running) == [0]
    assert ids(engine.scheduler.waiting) == [1, 2, 3]


def test_the_step_waits_for_an_adapter_only_if_nothing_else_can_run():
    pool = FakePool()
    engine = engine_of(pool)
    for adapter in ("a", None):
        add(engine, adapter, max_tokens=3)
    engine.step()
    while engine.scheduler.running:
        assert (ids(engine.scheduler.running), pool.loaded) == ([1], set())
        engine.step()
    assert ids(engine.scheduler.waiting) == [0]
    engine.step()
    assert ids(engine.scheduler.running) == [0]


def test_preempted_sequences_wait_in_the_order_of_arrival():
    """Sequence 0 waits for its adapter while 1 and 2 grow, until 2 is preempted."""
    pool = FakePool()
    engine = engine_of(pool, pages=10, watermark=0.0)
    for adapter, seed in (("a", 1), (None, 2), (None, 3)):
        add(engine, adapter, 12, 28, seed)
    while not engine.scheduler.preemptions:
        engine.step()
        engine.scheduler.check_integrity()
    assert ids(engine.scheduler.waiting) == [0, 2]
    pool.loaded.add("a")
    while engine.scheduler.has_work:
        engine.step()
        engine.scheduler.check_integrity()


def test_a_damaged_adapter_ends_requests_behind_one_that_waits():
    pool = FakePool()
    pool.damaged.add("b")
    engine = engine_of(pool)
    for adapter in ("a", "b", None):
        add(engine, adapter)
    assert engine.step().refused == {1: "damaged"}
    assert ids(engine.scheduler.waiting) == [0]


@pytest.mark.parametrize("size", [1, 2, 5])
def test_random_requests_with_few_slots_and_pages(size):
    rng = np.random.default_rng(size)
    engine = engine_of(pool_of(size), pages=22, max_step_tokens=16)
    expected = {}
    for number in range(80):
        name, length, most = rng.choice([*NAMES, None]), int(rng.integers(1, 60)), int(rng.integers(1, 30))
        expected[add(engine, name, length, most, number)] = answer(text(length, number), most)
    ended = {}
    while engine.scheduler.has_work:
        ended |= engine.step().finished
        engine.scheduler.check_integrity()
        assert len({sequence.request.adapter for sequence in engine.scheduler.running} - {None}) <= size
    assert {sequence_id: completion.tokens.tolist() for sequence_id, completion in ended.items()} == expected
    assert engine.scheduler.preemptions
    engine.close()


def test_no_adapter_waits_forever():
    """Requests of two adapters arrive in every step, so that some of each always run, and one of a third."""
    engine = engine_of(pool_of(2), pages=100, max_sequences=8)
    for name in "abab":
        add(engine, name, max_tokens=20)
    while not engine.scheduler.running:
        engine.step()
    third, ended, steps = add(engine, "c", max_tokens=5), {}, 0
    while third not in ended and steps < 100:
        for name in "ab":
            add(engine, name, max_tokens=20)
        ended |= engine.step().finished
        steps += 1
    assert steps < 40
    engine.close()
