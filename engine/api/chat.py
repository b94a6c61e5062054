"""`POST /v1/chat/completions`."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.errors import ApiError
from engine.api.outputs import Delta
from engine.api.responses import ResponseFormat, respond
from engine.api.schemas import ChatRequest
from engine.api.service import Service, encode_in_background, token_text
from engine.models.detokenize import Decode
from engine.sampling.logprobs import Logprobs
from ssd.errors import UserError


async def chat(service: Service, body: ChatRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Answer a chat. Raises ApiError and UserError."""
    service.check_model(body.model)
    prompt = await _prompt(service, body)
    given = body.max_completion_tokens or body.max_tokens
    param = "max_completion_tokens" if body.max_completion_tokens else "max_tokens"
    max_tokens = service.output_limit(prompt, given, service.max_tokens, param)
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    requests = service.requests(body, prompt, max_tokens, await service.hints(body), logprobs=logprobs)
    return await respond(service, body, requests, _ChatFormat(service, body, requests), http)


async def _prompt(service: Service, body: ChatRequest) -> np.ndarray:
    """Return the token ids of the messages, uint32 [P]. Raises ApiError."""
    messages = [message.model_dump(exclude_none=True) for message in body.messages]
    render = partial(service.served.chat.tokens, messages, arguments=body.chat_template_kwargs)
    try:
        return await encode_in_background(render, sum(len(str(message.content)) for message in body.messages))
    except UserError as problem:
        raise ApiError(400, str(problem), param="messages") from None


class _ChatFormat(ResponseFormat):
    """Format of chat completions: complete responses and stream chunks."""

    id_prefix = "chatcmpl"
    object_name = "chat.completion"
    chunk_name = "chat.completion.chunk"

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return one chunk per output with the assistant's role."""
        content = {"delta": {"role": "assistant", "content": ""}}
        return [self.chunk([self.choice(index, content, None)]) for index in range(len(self.requests))]

    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """See `ResponseFormat.choice_of`."""
        if is_chunk:
            content: dict[str, Any] = {"delta": {"content": delta.text} if delta.text else {}}
        else:
            content = {"message": {"role": "assistant", "content": delta.text}}
        choice = self.choice(delta.index, content, delta.completion) | self.pieces(delta)
        if delta.logprobs is not None:
            choice["logprobs"] = _token_logprobs(delta.tokens, delta.logprobs, self.decode)
        return choice


def _token_logprobs(tokens: np.ndarray, logprobs: Logprobs, decode: Decode) -> dict[str, Any]:
    """Return the log-probabilities of `tokens`, uint32 [N]."""
    rows = zip(tokens.tolist(), logprobs.tokens.tolist(), logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
    return {
        "content": [
            _entry(token, value, decode)
            | {"top_logprobs": [_entry(*each, decode) for each in zip(ids, values, strict=True)]}
            for token, value, ids, values in rows
        ]
    }


def _entry(token: int, value: float, decode: Decode) -> dict[str, Any]:
    text = token_text(token, decode)
    return {"token": text, "logprob": value, "bytes": list(text.encode())}
