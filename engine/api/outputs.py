"""Stream the outputs of requests as pieces of text, merged over all requests of an HTTP request."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from engine.api.messages import OutputEvent, RequestEnded, RequestRestarted, RequestTimes
from engine.models.tokenizer import Detokenizer
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request

NO_TOKENS = np.empty(0, np.uint32)


class Piece(NamedTuple):
    """A part of an output's text."""

    text: str
    is_drafted: bool
    """Whether its tokens were drafted."""


@dataclass(frozen=True, eq=False)
class Delta:
    """The next part of an output, or a complete output."""

    index: int
    """Index of its request."""
    pieces: list[Piece]
    tokens: np.ndarray
    """uint32 [n]."""
    logprobs: Logprobs | None = None
    """Log-probabilities of `tokens`, if requested."""
    completion: Completion | None = None
    """Set in the last delta of an output."""
    times: RequestTimes | None = None
    """Set in the last delta of an output that the engine ran."""
    is_restarted: bool = False
    """Whether the output begins again, so that all earlier deltas of it are void; this one is empty."""

    @property
    def text(self) -> str:
        """Text of all pieces."""
        return "".join(piece.text for piece in self.pieces)


class OutputText:
    """Text of one output, released in pieces of complete characters that cannot belong to a stop string.

    The engine decides where an output ends; this class only holds text back while it may still be cut.
    """

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str] = ()) -> None:
        self._detokenizer = detokenizer
        self._stops = stops
        self._held = ""
        """Text that may belong to a stop string."""
        self._released = 0
        """Number of characters released."""

    def feed(self, tokens: np.ndarray, accepted: int) -> list[Piece]:
        """Add tokens and return the pieces that can be released. The first `accepted` tokens were drafted."""
        pieces = []
        for part, is_drafted in ((tokens[:accepted], True), (tokens[accepted:], False)):
            if len(part):
                text = self._split_off_certain("".join(map(self._detokenizer.feed, part.tolist())))
                pieces += self._release(text, is_drafted)
        return pieces

    def finish(self, whole: str | None) -> list[Piece]:
        """Return the remaining pieces. `whole`: the complete text if the engine cut it at a stop string."""
        rest = self._held + self._detokenizer.finish() if whole is None else whole[self._released :]
        return self._release(rest, is_drafted=False)

    def _split_off_certain(self, text: str) -> str:
        # `min_tokens` may let a complete stop string pass without ending the output; it must be released later.
        searched = len(self._held)
        self._held += text
        starts = [self._held.find(stop, max(0, searched - len(stop) + 1)) for stop in self._stops]
        certain = min((start for start in starts if start >= 0), default=len(self._held) - self._stop_prefix_length())
        released, self._held = self._held[:certain], self._held[certain:]
        return released

    def _stop_prefix_length(self) -> int:
        """Return the length of the longest suffix of the held text that is a proper prefix of a stop string."""
        longest = max(map(len, self._stops), default=1) - 1
        sizes = range(min(longest, len(self._held)), 0, -1)
        return next((size for size in sizes if any(stop.startswith(self._held[-size:]) for stop in self._stops)), 0)

    def _release(self, text: str, is_drafted: bool) -> list[Piece]:
        self._released += len(text)
        return [Piece(text, is_drafted)] if text else []


Run = Callable[[Request], AsyncGenerator[OutputEvent, None]]
"""Runs a request and yields its events, like `EngineProcess.run`."""


async def stream_deltas(
    run: Run,
    requests: Sequence[Request],
    text_of: Callable[[Request], OutputText],
    on_end: Callable[[], None] = lambda: None,
) -> AsyncGenerator[Delta, None]:
    """Yield the deltas of all requests in the order in which they arrive. Closing the iterator cancels all requests.

    `text_of` returns the text of an output that begins. `on_end` is called once per request when it stops running,
    whether or not its deltas were read.

    Raises UserError for a request that cannot run, and EngineGoneError.
    """
    deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_run_one(run, index, request, text_of, deltas)) for index, request in enumerate(requests)
    ]
    for task in tasks:
        task.add_done_callback(lambda _: on_end())
    try:
        unfinished = len(tasks)
        while unfinished:
            delta = await deltas.get()
            if isinstance(delta, BaseException):
                raise delta
            unfinished -= delta.completion is not None
            yield delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _run_one(
    run: Run,
    index: int,
    request: Request,
    text_of: Callable[[Request], OutputText],
    deltas: asyncio.Queue[Delta | BaseException],
) -> None:
    try:
        text = text_of(request)
        async with aclosing(run(request)) as events:
            async for event in events:
                if isinstance(event, RequestEnded):
                    completion = event.completion
                    pieces = text.feed(completion.content, 0) if completion.is_repeat else []
                    pieces += text.finish(completion.text)
                    deltas.put_nowait(Delta(index, pieces, NO_TOKENS, completion=completion, times=event.times))
                elif isinstance(event, RequestRestarted):
                    text = text_of(request)
                    deltas.put_nowait(Delta(index, [], NO_TOKENS, is_restarted=True))
                else:
                    pieces = text.feed(event.tokens[: event.visible], event.accepted)
                    deltas.put_nowait(Delta(index, pieces, event.tokens, event.logprobs))
    except Exception as problem:
        deltas.put_nowait(problem)
