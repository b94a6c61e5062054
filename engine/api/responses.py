"""Responses to requests: complete JSON documents, or streams of server-sent events."""

from __future__ import annotations

import asyncio
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

import orjson
from fastapi import Request as HttpRequest
from fastapi.responses import Response, StreamingResponse

from engine.api.engine_process import EngineGoneError
from engine.api.errors import ApiError, engine_errors, error_body
from engine.api.logprobs import TokenNames
from engine.api.metrics import RequestRecorder
from engine.api.outputs import Delta, OutputText, Piece, stream_deltas
from engine.api.schemas import SamplingFields
from engine.api.service import Service
from engine.models.tokenizer import Detokenizer
from engine.scheduling.draft_usage import draft_usage
from engine.scheduling.request import Completion, Request

T = TypeVar("T")


class ClientGoneError(Exception):
    """Raised when the client has closed the connection."""


class ResponseFormat(ABC):
    """Builds the JSON of one response in the format of an endpoint, and keeps state for usage and log-probabilities."""

    id_prefix: str
    object_name: str
    chunk_name: str

    def __init__(self, service: Service, body: SamplingFields, requests: Sequence[Request]) -> None:
        """`requests`: `n` requests per prompt, in the order of the prompts."""
        self.requests = requests
        self.completions: dict[int, Completion] = {}
        """Completions of the outputs that have ended, by request index."""
        self.names = TokenNames(service.served.tokenizer, as_ids=body.return_tokens_as_token_ids)
        self._body = body
        self._header = {
            "id": f"{self.id_prefix}-{secrets.token_hex(16)}",
            "created": int(time.time()),
            "model": body.model,
        }

    @abstractmethod
    def first_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks at the beginning of a stream."""

    @abstractmethod
    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """Return the choice of a stream chunk or, for a delta that is a complete output, of a complete response."""

    def document(self, outputs: Sequence[Delta]) -> dict[str, Any]:
        """Return a complete response."""
        self.completions = {output.index: output.completion for output in outputs if output.completion is not None}
        choices = [self.choice_of(output, is_chunk=False) for output in outputs]
        return self._header | {"object": self.object_name, "choices": choices, "usage": self._usage()}

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """Return the chunks for a delta: one, or none if nothing in it is visible.

        Raises ApiError for an output that begins again, since its first chunks cannot be taken back.
        """
        if delta.is_restarted:
            raise ApiError(503, "the weights of the model changed, and the output began again; send the request again")
        if delta.completion is not None:
            self.completions[delta.index] = delta.completion
        choice = self.choice_of(delta, is_chunk=True)
        has_tokens = delta.logprobs is not None or self._body.return_token_ids
        # Text that may belong to a stop string or a tool call is sent later.
        has_text = bool(delta.pieces) and (choice.get("delta") != {} or self._body.return_drafted)
        return [self.chunk([choice])] if has_text or has_tokens or delta.completion is not None else []

    def last_chunks(self) -> list[dict[str, Any]]:
        """Return the chunks at the end of a stream."""
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        return [self.chunk([]) | {"usage": self._usage()}]

    def chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        """Return one chunk of a stream."""
        return self._header | {"object": self.chunk_name, "choices": choices}

    def choice(self, index: int, content: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
        """Return a choice without log-probabilities; `completion`: None until the output has ended."""
        reason, stop_reason = (None, None) if completion is None else (completion.finish_reason, completion.stop_reason)
        return {"index": index, **content, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}

    def prompt_index(self, index: int) -> int:
        """Return the index of the prompt of an output."""
        return index // self._body.n

    def prompt_fields(self, index: int) -> dict[str, Any]:
        """Return the token ids of the prompt of an output, if they were requested."""
        return {"prompt_token_ids": self.requests[index].prompt.tolist()} if self._body.return_token_ids else {}

    def token_fields(self, delta: Delta) -> dict[str, Any]:
        """Return the fields that were requested about the tokens of a delta: their ids, and which text is drafted."""
        ids = {"token_ids": delta.tokens.tolist()} if self._body.return_token_ids else {}
        return ids | ({"pieces": [list(piece) for piece in delta.pieces]} if self._body.return_drafted else {})

    def _usage(self) -> dict[str, Any]:
        return usage([len(request.prompt) for request in self.requests[:: self._body.n]], self.completions)


def usage(prompts: Sequence[int], completions: Mapping[int, Completion]) -> dict[str, Any]:
    """Return OpenAI's usage object, including its fields for predicted outputs, and our fields.

    prompts: number of tokens of each prompt. completions: by index; the outputs of a prompt are consecutive, and all
    prompts have the same number of outputs.
    """
    outputs = completions.values()
    prompt_tokens = sum(prompts)
    completion_tokens = sum(len(completion.tokens) for completion in outputs)
    drafted = sum(completion.predicted.drafted for completion in outputs)
    accepted = sum(completion.predicted.accepted for completion in outputs)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": _cached_tokens(len(completions) // len(prompts), completions)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": accepted,
            "rejected_prediction_tokens": drafted - accepted,
        },
        "draft": draft_usage(outputs),
        "repeated_tokens": sum(len(completion.tokens) for completion in outputs if completion.is_repeat),
    }


def _cached_tokens(n: int, completions: Mapping[int, Completion]) -> int:
    """Return the number of prompt tokens cached before the HTTP request: the minimum over the `n` outputs of a prompt.

    Later outputs of a prompt find the pages of the first one.
    """
    return sum(
        min(completions[first + index].cached_tokens for index in range(n)) for first in range(0, len(completions), n)
    )


async def respond(
    service: Service, body: SamplingFields, requests: Sequence[Request], form: ResponseFormat, http: HttpRequest
) -> dict[str, Any] | Response:
    """Run requests and return the response, streamed if the body says so.

    Raises ApiError, and ClientGoneError if the client disconnects, which cancels the running requests.
    """
    if body.stream:
        return await _streamed(_deltas(service, body, requests), form, http)
    return form.document(await _while_connected(_outputs(service, body, requests), http))


async def _deltas(service: Service, body: SamplingFields, requests: Sequence[Request]) -> AsyncGenerator[Delta, None]:
    """Admit requests and yield their deltas. Raises ApiError."""
    recorder = RequestRecorder(service.metrics, requests)
    decode = service.served.tokenizer.decode

    def text_of(request: Request) -> OutputText:
        return OutputText(Detokenizer(decode, request.prompt), request.sampling.stop)

    try:
        service.admission.admit(len(requests))
        run, release = service.run, service.admission.release
        with engine_errors(body.prompt_field):
            async with aclosing(stream_deltas(run, requests, text_of, release)) as deltas:
                async for delta in deltas:
                    recorder.record(delta)
                    yield delta
    except EngineGoneError as problem:
        raise ApiError(503, f"the engine has stopped: {problem}") from None
    except (asyncio.CancelledError, GeneratorExit):
        recorder.record_abort()
        raise


async def _outputs(service: Service, body: SamplingFields, requests: Sequence[Request]) -> list[Delta]:
    """Return the outputs of all requests, each as one delta."""
    pieces: list[list[Piece]] = [[] for _ in requests]
    completions: dict[int, Completion] = {}
    async with aclosing(_deltas(service, body, requests)) as deltas:
        async for delta in deltas:
            pieces[delta.index] = [] if delta.is_restarted else pieces[delta.index] + delta.pieces
            if delta.completion is not None:
                completions[delta.index] = delta.completion
    return [
        Delta(index, pieces[index], completion.tokens, completion.logprobs, completion)
        for index, completion in sorted(completions.items())
    ]


async def _streamed(deltas: AsyncGenerator[Delta, None], form: ResponseFormat, http: HttpRequest) -> StreamingResponse:
    # Invalid requests fail before their first delta, while an error response can still be sent.
    first_delta = await _while_connected(anext(deltas), http)

    async def events() -> AsyncIterator[bytes]:
        async with aclosing(deltas):
            try:
                for chunk in (*form.first_chunks(), *form.chunks(first_delta)):
                    yield _server_sent(chunk)
                async for delta in deltas:
                    for chunk in form.chunks(delta):
                        yield _server_sent(chunk)
                for chunk in form.last_chunks():
                    yield _server_sent(chunk)
            except ApiError as error:
                yield _server_sent(error_body(error))
            yield b"data: [DONE]\n\n"

    return StreamingResponse(events(), media_type="text/event-stream", headers={"Cache-Control": "no-cache"})


async def _while_connected(work: Awaitable[T], http: HttpRequest) -> T:
    """Await `work`; cancel it and raise ClientGoneError if the client disconnects first."""
    working = asyncio.ensure_future(work)
    disconnecting = asyncio.ensure_future(_disconnected(http))
    try:
        await asyncio.wait({working, disconnecting}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGoneError
        return working.result()
    finally:
        for task in (working, disconnecting):
            task.cancel()
        await asyncio.gather(working, disconnecting, return_exceptions=True)


async def _disconnected(http: HttpRequest) -> None:
    while (await http.receive())["type"] != "http.disconnect":
        pass


def _server_sent(data: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(data) + b"\n\n"
