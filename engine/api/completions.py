"""`POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.logprobs import TextOffsets, completion_logprobs, prompt_offsets
from engine.api.outputs import Delta
from engine.api.responses import ResponseFormat, respond
from engine.api.schemas import CompletionRequest
from engine.api.service import DEFAULT_MAX_TOKENS, Service, encode_in_background
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Request


async def complete(service: Service, body: CompletionRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Complete one or several prompts. Raises ApiError and UserError."""
    service.check_model(body.model)
    prompt_logprobs = body.logprobs if body.echo else None
    if body.max_tokens == 0:
        prompt_logprobs = prompt_logprobs or 0  # The engine runs a prompt without an output to score it.
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
    encode = partial(service.served.tokenizer.encode, add_special_tokens=body.add_special_tokens)
    return [
        await encode_in_background(partial(encode, prompt), len(prompt))
        if isinstance(prompt, str)
        else np.array(prompt, np.uint32)
        for prompt in body.prompts
    ]


class _CompletionFormat(ResponseFormat):
    """Format of text completions: complete responses and stream chunks."""

    id_prefix = "cmpl"
    object_name = chunk_name = "text_completion"

    def __init__(self, service: Service, body: CompletionRequest, requests: Sequence[Request]) -> None:
        super().__init__(service, body, requests)
        self._given = body.prompts
        self._tokenizer = service.served.tokenizer
        self._has_echo = body.echo
        self._offsets: defaultdict[int, TextOffsets] = defaultdict(TextOffsets)
        """Offsets of the tokens of each output so far; the text sent so far may be shorter."""

    def first_chunks(self) -> list[dict[str, Any]]:
        """Return chunks with the prompts, if their texts or ids were requested."""
        if not (self._has_echo or self.prompt_fields(0)):
            return []
        given = [{"text": self._echo(index)} | self.prompt_fields(index) for index in range(len(self.requests))]
        return [self.chunk([self.choice(index, fields, None)]) for index, fields in enumerate(given)]

    def choice_of(self, delta: Delta, *, is_chunk: bool) -> dict[str, Any]:
        """See `ResponseFormat.choice_of`."""
        echo = "" if is_chunk else self._echo(delta.index)
        choice = self.choice(delta.index, {"text": echo + delta.text}, delta.completion) | self.token_fields(delta)
        if not is_chunk:
            choice |= self.prompt_fields(delta.index)
        if delta.logprobs is not None:
            choice["logprobs"] = self._logprobs(delta, delta.logprobs, echo)
        return choice

    def _echo(self, index: int) -> str:
        """Return the text of the prompt of an output, as it was sent or with the special tokens among its ids.

        Empty unless it was requested.
        """
        if not self._has_echo:
            return ""
        given = self._given[self.prompt_index(index)]
        prompt = self.requests[index].prompt
        return given if isinstance(given, str) else self._tokenizer.decode(prompt, skip_special_tokens=False)

    def _logprobs(self, delta: Delta, logprobs: Logprobs, echo: str) -> dict[str, Any]:
        if self._has_echo:  # Not streamed, so that this is called once for an output.
            self._offsets[delta.index] = TextOffsets(len(echo))
        pieces = map(self.names.output_bytes, delta.tokens.tolist())
        values = completion_logprobs(delta.tokens, logprobs, self.names, self._offsets[delta.index].advance(pieces))
        if not self._has_echo:
            return values
        prompt, prompt_logprobs = self.requests[delta.index].prompt, self.completions[delta.index].prompt_logprobs
        assert prompt_logprobs is not None
        offsets = prompt_offsets(echo, list(map(self._tokenizer.token_bytes, prompt.tolist())))
        # The first token has no log-probability.
        rest = completion_logprobs(prompt[1:], prompt_logprobs, self.names, offsets[1:])
        first = {"tokens": self.names.name(int(prompt[0])), "text_offset": 0}
        joined: dict[str, Any] = {}
        for name, before in rest.items():
            own = values[name]
            joined[name] = None if before is None or own is None else [first.get(name), *before, *own]
        return joined
