"""From requests to the deltas of their outputs, as they come, in whatever order they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace

import numpy as np

from engine.api.messages import Ended, Produced, RequestTimes
from engine.api.text import OutputText, Piece
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, FinishReason, Request


@dataclass(frozen=True, eq=False)
class Delta:
    """More of one output."""

    index: int
    """Of its request."""
    pieces: list[Piece]
    tokens: np.ndarray
    """uint32 [n]."""
    logprobs: Logprobs | None = None
    """Of these tokens, if they were asked for."""
    completion: Completion | None = None
    """With the last delta of an output."""
    times: RequestTimes | None = None
    """The same, if the engine ran it."""

    @property
    def text(self) -> str:
        """All of the pieces."""
        return "".join(piece.text for piece in self.pieces)


@dataclass(frozen=True, eq=False)
class Output:
    """One output, whole."""

    pieces: list[Piece]
    completion: Completion

    @property
    def text(self) -> str:
        """All of the pieces."""
        return "".join(piece.text for piece in self.pieces)


NO_TOKENS = np.empty(0, np.uint32)


Run = Callable[[Request], AsyncGenerator[Produced | Ended, None]]
"""Runs a request, as `EngineProcess.run`."""


def dropping_output(run: Run) -> Run:
    """Runs requests of one token for the sake of their prompts alone: there is an end, and nothing before it."""

    async def run_and_drop(request: Request) -> AsyncGenerator[Produced | Ended, None]:
        async with aclosing(run(request)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    yield replace(event, completion=_without_output(event.completion))

    return run_and_drop


def _without_output(completion: Completion) -> Completion:
    return replace(
        completion,
        tokens=NO_TOKENS,
        finish_reason=FinishReason.LENGTH,
        steps=0,
        stop_reason=None,
        text=None,
        logprobs=None if completion.logprobs is None else completion.logprobs.at(np.arange(0)),
    )


async def deltas_of(
    run: Run, requests: Sequence[Request], texts: Sequence[OutputText], ended: Callable[[], None] = lambda: None
) -> AsyncGenerator[Delta, None]:
    """All deltas of all requests. Closing the iterator cancels what still runs.

    `ended` is called once for each request that runs no more, whether or not its deltas have been taken.

    Raises UserError for a request that cannot run, and EngineGoneError.
    """
    deltas: asyncio.Queue[Delta | BaseException] = asyncio.Queue()
    tasks = [
        asyncio.create_task(_follow(run, index, request, text, deltas))
        for index, (request, text) in enumerate(zip(requests, texts, strict=True))
    ]
    for task in tasks:
        task.add_done_callback(lambda _: ended())
    try:
        left = len(tasks)
        while left:
            delta = await deltas.get()
            if isinstance(delta, BaseException):
                raise delta
            left -= delta.completion is not None
            yield delta
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _follow(
    run: Run,
    index: int,
    request: Request,
    text: OutputText,
    deltas: asyncio.Queue[Delta | BaseException],
) -> None:
    try:
        async with aclosing(run(request)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    completion = event.completion
                    pieces = text.finish(completion.text)
                    deltas.put_nowait(Delta(index, pieces, NO_TOKENS, completion=completion, times=event.times))
                else:
                    pieces = text.feed(event.tokens[: event.shown], event.accepted)
                    deltas.put_nowait(Delta(index, pieces, event.tokens, event.logprobs))
    except Exception as problem:
        deltas.put_nowait(problem)
