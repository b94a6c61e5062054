"""`EngineProcess` with an engine whose model is fake, and the pieces of text that outputs are released in."""

import asyncio
import multiprocessing
import time
from contextlib import aclosing
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.api.engine_process import EngineGoneError, EngineProcess
from engine.api.messages import RequestEnded
from engine.api.outputs import OutputText
from engine.api.server import read_keys
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.fake_runner import fake_engine

TIMEOUT_S = 60


def request(tokens=4, prompt=(1, 2, 3)):
    return Request(np.array(prompt, np.uint32), SamplingParams(max_tokens=tokens, ignore_eos=True))


@pytest.fixture(scope="module")
async def engine():
    engine = EngineProcess(partial(fake_engine, NoDrafter(), None))
    try:
        await engine.start()
        yield engine
    finally:
        await engine.stop()


async def eventually(condition):
    until = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < until, "the condition did not become true"
        await asyncio.sleep(0.01)


async def size_of(events):
    """Return the number of tokens of all requests."""
    return sum([0 if isinstance(event, RequestEnded) else len(event.tokens) async for _, event in events])


@pytest.mark.anyio
async def test_requests_cancelled_at_any_time_free_their_pages(engine):
    assert await size_of(engine.run([request(5), request(6)])) == 11
    for refused in ([request(prompt=())], [request(100_000), request(prompt=()), request(100_000)]):
        with pytest.raises(UserError, match="empty"):
            await size_of(engine.run(refused))
    for count in (0, 1, 3):
        events = engine.run([request(100_000)] * 3)
        async with aclosing(events):
            for _ in range(count):
                await anext(events)
    unread = asyncio.create_task(size_of(engine.run([request(100_000)])))
    await asyncio.sleep(0)
    assert engine.open_requests == 1
    unread.cancel()
    await eventually(lambda: engine.open_requests == 0)
    await eventually(lambda: engine.stats.steps > 0 and engine.stats.running == 0 and engine.stats.kv_usage == 0)


@pytest.mark.anyio
async def test_a_slow_reader_does_not_block_admission(engine):
    events = engine.run([request(40), request(40)])
    async with aclosing(events):
        await anext(events)  # reads nothing after this
        await eventually(lambda: engine.open_requests == 0)


@pytest.mark.anyio
async def test_an_engine_that_cannot_be_built_is_an_error():
    refused = EngineProcess(partial(read_keys, Path("/absent")))  # Imports little.
    with pytest.raises(UserError, match="cannot read /absent"):
        await refused.start()
    await refused.stop()


@pytest.mark.anyio
async def test_a_killed_engine_ends_requests(engine):
    """The last test of `engine`."""
    running = asyncio.create_task(size_of(engine.run([request(100_000)])))
    [process] = [each for each in multiprocessing.active_children() if each.name == "ssd-engine"]
    process.kill()
    with pytest.raises(EngineGoneError, match="the engine process has ended"):
        await asyncio.wait_for(running, TIMEOUT_S)
    await asyncio.wait_for(engine.wait_for_end(), TIMEOUT_S)
    with pytest.raises(EngineGoneError):
        await size_of(engine.run([request(1)]))


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), max_size=3)
STEPS = st.lists(st.tuples(st.text("abc\n", min_size=1, max_size=5), st.integers(0, 5)), max_size=12)


class Whole:
    """A detokenizer with one character per token."""

    def feed(self, token):
        return chr(token)

    def finish(self):
        return ""


class Halves:
    """The same; every other character is held back until the next, like half of a UTF-8 sequence."""

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
    output = OutputText(Halves())
    fed = released = 0
    for text, accepted in steps:
        tokens = np.array([ord(letter) for letter in text], np.uint32)
        fed += len(text)
        released += sum(len(piece.text) for piece in output.feed(tokens, min(accepted, len(tokens))))
        assert released == fed // 2 * 2
    assert len("".join(piece.text for piece in output.finish(None))) == fed % 2


def test_pieces_are_marked_as_drafted_or_not():
    output = OutputText(Whole(), ["zz"])
    assert output.feed(np.array([97, 98, 99], np.uint32), 2) == [("ab", True), ("c", False)]
    assert output.feed(np.array([122], np.uint32), 1) == []
    assert output.finish(None) == [("z", False)]
