"""The HTTP side of the pipe, and what lies on it, with an engine that counts in a thread or a process of its own."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from functools import partial

import numpy as np
import pytest

from engine.api.admission import Admission
from engine.api.cache import ResponseCache
from engine.api.errors import ApiError
from engine.api.generation import deltas_of
from engine.api.messages import Ended
from engine.api.process import EngineGoneError, EngineProcess
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.engine.api.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio
PATIENCE_S = 60


@pytest.fixture
def anyio_backend():
    return "asyncio"


def request(tokens=4, prompt=(1, 2, 3), **more):
    salt = more.pop("salt", "")
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens, **more), salt=salt)


@asynccontextmanager
async def running(build=FakeEngine):
    engine = EngineProcess(build)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def eventually(condition):
    until = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < until, "it never came true"
        await asyncio.sleep(0.01)


class Text:
    """Tokens as they are."""

    def feed(self, tokens, accepted):
        return []

    def finish(self, whole):
        return []


async def tokens_of(events):
    return [token async for event in events if not isinstance(event, Ended) for token in event.tokens.tolist()]


async def test_requests_leaving_at_every_moment_give_everything_back():
    left = []
    async with running() as engine:
        assert await tokens_of(engine.run(request(5))) == [1, 2, 3, 4, 5]
        with pytest.raises(UserError, match="empty"):
            await tokens_of(engine.run(request(prompt=())))
        for events in (0, 1, 3):
            coming = deltas_of(engine.run, [request(100_000)] * 3, [Text()] * 3, lambda: left.append(1))
            async with aclosing(coming):
                for _ in range(events):
                    await anext(coming)
        never = asyncio.create_task(tokens_of(engine.run(request(100_000))))
        await asyncio.sleep(0)
        never.cancel()
        await eventually(lambda: engine.figures.pages > 0 and engine.figures.running == 0)
        await eventually(lambda: engine.figures.pages_used == 0)
    # Tasks of an iterator that never began were never there.
    assert len(left) == 6


async def test_who_reads_nothing_keeps_nobody_out():
    admission = Admission(2)
    async with running() as engine:
        admission.enter(2)
        coming = deltas_of(engine.run, [request(40), request(40)], [Text()] * 2, admission.leave)
        async with aclosing(coming):
            await anext(coming)  # and no more
            await eventually(lambda: admission.here == 0)
            admission.enter(2)


async def test_the_same_again_comes_from_the_cache():
    cache = ResponseCache(most_tokens=20)
    async with running() as engine:
        first = [event async for event in cache.run(engine, request(5))]
        steps = engine.figures.steps
        second = [event async for event in cache.run(engine, request(5))]
        assert cache.hits == 1
        assert second[-1].completion.tokens.tolist() == first[-1].completion.tokens.tolist() == [1, 2, 3, 4, 5]
        assert second[0].tokens.tolist() == [1, 2, 3, 4, 5]
        assert second[-1].completion.steps == 0
        for other in (request(5, salt="other"), request(5, temperature=1.0), request(6), request(5, (3, 2, 1))):
            await tokens_of(cache.run(engine, other))
        assert cache.hits == 1
        await tokens_of(cache.run(engine, request(5)))  # pushed out: 20 tokens hold two of these
        assert cache.hits == 1
        assert engine.figures.steps >= steps


async def test_an_engine_that_breaks_ends_every_request():
    async with running(partial(FakeEngine, breaks=3)) as engine:
        runs = [asyncio.create_task(tokens_of(engine.run(request(50)))) for _ in range(3)]
        for run in runs:
            with pytest.raises(EngineGoneError, match="on purpose"):
                await run
        await engine.wait_for_end()
        with pytest.raises(EngineGoneError):
            await tokens_of(engine.run(request()))


def test_admission_counts_to_its_bound():
    admission = Admission(3)
    admission.enter(2)
    with pytest.raises(ApiError) as caught:
        admission.enter(2)
    assert (caught.value.status, admission.refused, admission.here) == (429, 2, 2)
    with pytest.raises(ApiError) as caught:
        admission.enter(4)
    assert (caught.value.status, caught.value.param) == (400, "n")
    admission.leave()
    admission.enter(2)
