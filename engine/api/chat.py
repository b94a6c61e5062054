"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.errors import ApiError
from engine.api.generation import Delta, Output
from engine.api.logprobs import chat_logprobs
from engine.api.respond import streamed, whole
from engine.api.schemas import ChatRequest
from engine.api.service import Service, new_id, now, off_the_loop
from engine.api.usage import usage_of
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request
from ssd.errors import UserError


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Answer a chat. Raises ApiError and UserError."""
    service.check_model(body.model)
    prompt = await _prompt(service, body)
    asked = body.max_completion_tokens or body.max_tokens
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = service.requests(body, prompt, asked or service.room_behind(prompt), logprobs=logprobs)
    answer = _Answer(service, body, requests)
    if body.stream:
        return await streamed(service, body, requests, http, answer.first(), answer.chunks, answer.last)
    return answer.whole(await whole(service, body, requests, http))


async def _prompt(service: Service, body: ChatRequest) -> np.ndarray:
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    render = partial(service.served.chat.tokens, messages, arguments=body.chat_template_kwargs)
    try:
        return await off_the_loop(render, sum(len(str(message.content)) for message in body.messages))
    except UserError as problem:
        raise ApiError(400, str(problem), param="messages") from None


class _Answer:
    """The parts of one response."""

    def __init__(self, service: Service, body: ChatRequest, requests: list[Request]) -> None:
        self._body = body
        self._requests = requests
        self._decode = service.served.tokenizer.decode
        self._completions: dict[int, Completion] = {}
        self._about = {"id": new_id("chatcmpl"), "created": now(), "model": service.served.name}

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """A response that is no stream."""
        choices = []
        for index, output in enumerate(outputs):
            self._completions[index] = output.completion
            said = {"message": {"role": "assistant", "content": output.text}}
            choice = self._choice(index, said, output.completion) | self._pieces(output)
            choices.append(choice | self._logprobs(output.completion.tokens, output.completion.logprobs))
        return self._about | {"object": "chat.completion", "choices": choices, "usage": self._usage()}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        said = {"delta": {"role": "assistant", "content": ""}}
        return [self._chunk([self._choice(index, said, None)]) for index in range(len(self._requests))]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says of a delta."""
        if delta.completion is not None:
            self._completions[delta.index] = delta.completion
        elif not delta.pieces and delta.logprobs is None:
            return []
        said = {"delta": {"content": delta.text} if delta.text else {}}
        choice = self._choice(delta.index, said, delta.completion) | self._pieces(delta)
        return [self._chunk([choice | self._logprobs(delta.tokens, delta.logprobs)])]

    def last(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        return [self._chunk([]) | {"usage": self._usage()}]

    def _chunk(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return self._about | {"object": "chat.completion.chunk", "choices": choices}

    def _choice(self, index: int, said: dict[str, Any], completion: Completion | None) -> dict[str, Any]:
        reason, stop_reason = (None, None) if completion is None else (completion.finish_reason, completion.stop_reason)
        return {"index": index, **said, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}

    def _logprobs(self, tokens: np.ndarray, logprobs: Logprobs | None) -> dict[str, Any]:
        return {} if logprobs is None else {"logprobs": chat_logprobs(tokens, logprobs, self._decode)}

    def _pieces(self, output: Output | Delta) -> dict[str, Any]:
        return {"pieces": [list(piece) for piece in output.pieces]} if self._body.return_drafted else {}

    def _usage(self) -> dict[str, Any]:
        return usage_of([len(self._requests[0].prompt)], self._completions)
