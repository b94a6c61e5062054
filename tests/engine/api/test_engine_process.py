"""`EngineProcess` with a counting engine in a separate process, and the pieces of text that outputs are released in."""

import asyncio
import time
from contextlib import aclosing, asynccontextmanager
from functools import partial

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.api.engine_process import EngineGoneError, EngineProcess
from engine.api.errors import ApiError
from engine.api.messages import RequestEnded
from engine.api.outputs import OutputText, stream_deltas
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


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
STEPS = st.lists(st.tuples(st.text("abc\n", min_size=1, max_size=5), st.integers(0, 5)), max_size=12)


class Letters:
    """One character per token; every other one is held back until the next, like half of a UTF-8 sequence."""

    def __init__(self):
        self._half = ""

    def feed(self, token):
        whole, self._half = (self._half + chr(token), "") if self._half else ("", chr(token))
        return whole

    def finish(self):
        return self._half


def engine_of(steps, stops, min_tokens):
    """Return each step's part of the output, and the text before the stop string that ended it, if any."""
    taken, text = [], ""
    for step, accepted in steps:
        kept = ""
        for letter in step:
            kept, text = kept + letter, text + letter
            ends = [stop for stop in stops if text.endswith(stop) and len(text) > min_tokens]
            if ends:
                return [*taken, (kept, accepted)], text.removesuffix(max(ends, key=len))
        taken.append((kept, accepted))
    return taken, None


@given(STEPS, STOPS, st.integers(0, 6))
@example([("ab", 0), ("ab", 0), ("b", 1)], ["abb"], 0)
@example([("abb", 2)], ["abb", "b"], 0)
@example([("ab", 0), ("cc", 0)], ["ab"], 2)
def test_pieces_add_up_to_the_text(steps, stops, min_tokens):
    taken, cut = engine_of(steps, stops, min_tokens)
    text = "".join(letters for letters, _ in taken) if cut is None else cut

    class Whole(Letters):
        def feed(self, token):
            return chr(token)

    output, pieces = OutputText(Whole(), stops), []
    for letters, accepted in taken:
        tokens = np.array([ord(letter) for letter in letters], np.uint32)
        pieces += output.feed(tokens, min(accepted, len(tokens)))
        # Released text is never changed later.
        assert text.startswith("".join(piece.text for piece in pieces))
    pieces += output.finish(cut)
    assert "".join(piece.text for piece in pieces) == text
    assert all(piece.text for piece in pieces)


@given(STEPS)
def test_without_stop_strings_complete_characters_are_released_at_once(steps):
    output = OutputText(Letters())
    fed = released = 0
    for text, accepted in steps:
        tokens = np.array([ord(letter) for letter in text], np.uint32)
        fed += len(text)
        released += sum(len(piece.text) for piece in output.feed(tokens, min(accepted, len(tokens))))
        assert released == fed // 2 * 2
    assert len("".join(piece.text for piece in output.finish(None))) == fed % 2


def test_pieces_are_marked_as_drafted_or_not():
    class Whole(Letters):
        def feed(self, token):
            return chr(token)

    output = OutputText(Whole(), ["zz"])
    assert output.feed(np.array([97, 98, 99], np.uint32), 2) == [("ab", True), ("c", False)]
    assert output.feed(np.array([122], np.uint32), 1) == []
    assert output.finish(None) == [("z", False)]
