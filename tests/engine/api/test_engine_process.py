"""`EngineProcess` with a counting engine in a separate process."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from functools import partial

import numpy as np
import pytest

from engine.api.engine_process import EngineGoneError, EngineProcess
from engine.api.errors import ApiError
from engine.api.messages import RequestEnded
from engine.api.outputs import stream_deltas
from engine.api.service import Admission
from engine.scheduling.request import Request, SamplingParams
from ssd.errors import UserError
from tests.engine.api.fake_engine import FakeEngine

TIMEOUT_S = 60


def request(tokens=4, prompt=(1, 2, 3)):
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens))


@asynccontextmanager
async def running(build=FakeEngine):
    engine = EngineProcess(build)
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


@pytest.fixture(scope="module")
async def engine():
    async with running() as engine:
        yield engine


async def eventually(condition):
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        await asyncio.sleep(0.01)


class NoText:
    """Replaces `OutputText` where text does not matter."""

    def feed(self, tokens, accepted):
        return []

    def finish(self, whole):
        return []


async def tokens_of(events):
    return [token async for event in events if not isinstance(event, RequestEnded) for token in event.tokens.tolist()]


@pytest.mark.anyio
async def test_requests_cancelled_at_any_time_free_their_pages(engine):
    ended = []
    assert await tokens_of(engine.run(request(5))) == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="empty"):
        await tokens_of(engine.run(request(prompt=())))
    for events in (0, 1, 3):
        deltas = stream_deltas(engine.run, [request(100_000)] * 3, lambda _: NoText(), lambda: ended.append(1))
        async with aclosing(deltas):
            for _ in range(events):
                await anext(deltas)
    unread = asyncio.create_task(tokens_of(engine.run(request(100_000))))
    await asyncio.sleep(0)
    unread.cancel()
    await eventually(lambda: engine.stats.steps > 0 and engine.stats.running == 0)
    await eventually(lambda: engine.stats.kv_usage == 0)
    # An iterator that is closed before its first event creates no tasks.
    assert len(ended) == 6


@pytest.mark.anyio
async def test_requests_that_run_together_get_their_own_tokens(engine):
    runs = [tokens_of(engine.run(request(length, prompt=(100 * length,)))) for length in (7, 2, 9, 4)]
    for length, tokens in zip((7, 2, 9, 4), await asyncio.gather(*runs), strict=True):
        assert tokens == list(range(100 * length, 101 * length))


@pytest.mark.anyio
async def test_a_slow_reader_does_not_block_admission(engine):
    admission = Admission(2)
    admission.admit(2)
    deltas = stream_deltas(engine.run, [request(40), request(40)], lambda _: NoText(), admission.release)
    async with aclosing(deltas):
        await anext(deltas)  # reads nothing after this
        await eventually(lambda: admission.admitted == 0)
        admission.admit(2)


@pytest.mark.anyio
async def test_a_failing_engine_ends_every_request():
    async with running(partial(FakeEngine, fail_after=3)) as engine:
        runs = [asyncio.create_task(tokens_of(engine.run(request(50)))) for _ in range(3)]
        for run in runs:
            with pytest.raises(EngineGoneError, match="on purpose"):
                await run
        await engine.wait_for_end()
        with pytest.raises(EngineGoneError):
            await tokens_of(engine.run(request()))


def test_admission_limits_requests():
    admission = Admission(3)
    admission.admit(2)
    with pytest.raises(ApiError) as caught:
        admission.admit(2)
    assert (caught.value.status, admission.admitted) == (429, 2)
    with pytest.raises(ApiError) as caught:
        admission.admit(4)
    assert (caught.value.status, caught.value.param) == (400, "n")
    admission.release()
    admission.admit(2)
