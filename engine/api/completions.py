"""`POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.outputs import Delta
from engine.api.responses import ResponseFormat, respond
from engine.api.schemas import CompletionRequest
from engine.api.service import DEFAULT_MAX_TOKENS, Service, encode_in_background, token_text
from engine.models.detokenize import Decode
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Request


async def complete(service: Service, body: CompletionRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Complete one or several prompts. Raises ApiError and UserError."""
    service.check_model(body.model)
    prompt_logprobs = body.logprobs if body.echo else None
    hints = await service.hints(body)
    requests = [
        request
        for prompt in await _prompts(service, body)
        for request in service.requests(
            body,
            prompt,
            service.output_limit(prompt, body.max_tokens, DEFAULT_MAX_TOKENS, "max_tokens"),
            hints,
            logprobs=body.logprobs,
            prompt_logprobs=prompt_logprobs,
        )
    ]
    return await respond(service, body, requests, _CompletionFormat(service, body, requests), http)


async def _prompts(service: Service, body: CompletionRequest) -> list[np.ndarray]:
    """Return the token ids of all prompts, uint32 [P] each."""
    given = body.prompt
    is_single = isinstance(given, str) or isinstance(given[0], int)
    encode = service.served.tokenizer.encode
    return [
        await encode_in_background(partial(encode, prompt), len(prompt))
        if isinstance(prompt, str)
        else np.array(prompt, np.uint32)
        for prompt in ([given] if is_single else given)
    ]


class _CompletionFormat(ResponseFormat):
    """Format of text completions: complete responses and stream chunks."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, requests: Sequence[Request]) -> None:
        super().__init__(service, body, requests)
        self._has_echo = body.echo
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Number of characters in the tokens of each output so far."""

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return chunks with the prompts, if they were requested."""
        if not self._has_echo:
            return []
        return [
            self.chunk([self.choice(index, {"text": self._echo(index)}, None)]) for index in range(len(self.requests))
        ]

    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """See `ResponseFormat.choice_of`."""
        echo = "" if is_chunk else self._echo(delta.index)
        self._offsets[delta.index] += len(echo)
        choice = self.choice(delta.index, {"text": echo + delta.text}, delta.completion) | self.pieces(delta)
        if delta.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta.index, delta.tokens, delta.logprobs)
        return choice

    def _echo(self, index: int) -> str:
        return self.decode(self.requests[index].prompt) if self._has_echo else ""

    def _logprobs(self, index: int, tokens: np.ndarray, logprobs: Logprobs) -> dict[str, Any]:
        values = _token_logprobs(tokens, logprobs, self.decode, self._offsets[index])
        # Offsets are based on the tokens, because the text sent so far may be shorter.
        self._offsets[index] += sum(map(len, values["tokens"]))
        if self._has_echo:
            prompt_logprobs = self.completions[index].prompt_logprobs
            assert prompt_logprobs is not None
            before = _prompt_logprobs(self.requests[index].prompt, prompt_logprobs, self.decode)
            values = {name: before[name] + own for name, own in values.items()}
        return values


def _token_logprobs(tokens: np.ndarray, logprobs: Logprobs, decode: Decode, offset: int) -> dict[str, list[Any]]:
    """Return the log-probabilities of `tokens`, uint32 [N], whose text begins `offset` characters into the output."""
    texts = [token_text(token, decode) for token in tokens.tolist()]
    starts = offset + np.cumsum([0, *map(len, texts)])[: len(texts)]
    return {
        "tokens": texts,
        "token_logprobs": logprobs.tokens.tolist(),
        "top_logprobs": [
            {token_text(token, decode): value for token, value in zip(ids, values, strict=True)}
            for ids, values in zip(logprobs.top_ids.tolist(), logprobs.top.tolist(), strict=True)
        ],
        "text_offset": starts.tolist(),
    }


def _prompt_logprobs(prompt: np.ndarray, logprobs: Logprobs, decode: Decode) -> dict[str, list[Any]]:
    """Return the log-probabilities of a prompt, uint32 [P]; its first token has none."""
    first = token_text(int(prompt[0]), decode)
    rest = _token_logprobs(prompt[1:], logprobs, decode, len(first))
    head = {"tokens": first, "token_logprobs": None, "top_logprobs": None, "text_offset": 0}
    return {name: [value, *rest[name]] for name, value in head.items()}
