"""Requests to responses: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import StreamingResponse

from engine.api.errors import ApiError, body_of, refused
from engine.api.generation import Delta, Output, deltas_of
from engine.api.process import EngineGoneError
from engine.api.schemas import SamplingFields
from engine.api.service import Service
from engine.api.text import Piece
from engine.scheduling.request import Completion, Request
from ssd.errors import UserError

T = TypeVar("T")
Chunks = Callable[[Delta], list[dict[str, Any]]]


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


async def deltas(service: Service, body: SamplingFields, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
    """The deltas of requests that were let in. Raises ApiError."""
    watch = service.metrics.watch(requests, body.n)
    texts = [service.text_of(request) for request in requests]
    try:
        service.admission.enter(len(requests))
        run, leave = service.runner(body, requests), service.admission.leave
        async with aclosing(deltas_of(run, requests, texts, leave)) as coming:
            async for delta in coming:
                watch.note(delta)
                yield delta
    except UserError as problem:
        raise refused(str(problem), body.prompt_field) from None
    except EngineGoneError as problem:
        raise ApiError(503, f"the engine has stopped: {problem}") from None
    except (asyncio.CancelledError, GeneratorExit):
        watch.abandon()
        raise


async def whole(service: Service, body: SamplingFields, requests: Sequence[Request], http: HttpRequest) -> list[Output]:
    """Complete outputs. Raises ApiError, and ClientGoneError if nobody waits any more: then nothing runs on."""

    async def gather() -> list[Output]:
        pieces: list[list[Piece]] = [[] for _ in requests]
        completions: dict[int, Completion] = {}
        async with aclosing(deltas(service, body, requests)) as coming:
            async for delta in coming:
                pieces[delta.index] += delta.pieces
                if delta.completion is not None:
                    completions[delta.index] = delta.completion
        return [Output(pieces[index], completions[index]) for index in range(len(requests))]

    return await _while_connected(gather(), http)


async def streamed(
    service: Service,
    body: SamplingFields,
    requests: Sequence[Request],
    http: HttpRequest,
    first: Sequence[dict[str, Any]],
    chunks: Chunks,
    last: Callable[[], list[dict[str, Any]]],
) -> StreamingResponse:
    """Server-sent events: `first`, `chunks` of each delta, and `last`.

    Raises ApiError if nothing could begin, and ClientGoneError if nobody waits any more.
    """
    coming = deltas(service, body, requests)
    # What cannot run is known with the first delta: then the answer is an error, not a stream.
    begun = await _while_connected(anext(coming), http)

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(coming):
            try:
                for chunk in (*first, *chunks(begun)):
                    yield _event(chunk)
                async for delta in coming:
                    for chunk in chunks(delta):
                        yield _event(chunk)
                for chunk in last():
                    yield _event(chunk)
            except ApiError as error:
                yield _event(body_of(error.status, error.message, error.param, error.code))
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _while_connected(work: Awaitable[T], http: HttpRequest) -> T:
    working = asyncio.ensure_future(work)
    leaving = asyncio.ensure_future(_gone(http))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _event(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
