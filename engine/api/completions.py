"""`POST /v1/completions`."""

from __future__ import annotations

from collections import defaultdict
from functools import partial
from typing import Any

import numpy as np
from fastapi import Request as HttpRequest
from fastapi.responses import Response

from engine.api.generation import Delta, Output
from engine.api.logprobs import completion_logprobs, prompt_logprobs
from engine.api.respond import streamed, whole
from engine.api.schemas import CompletionRequest
from engine.api.service import DEFAULT_MAX_TOKENS, Service, new_id, now, off_the_loop
from engine.api.usage import usage_of
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request


async def complete(service: Service, body: CompletionRequest, http: HttpRequest) -> dict[str, Any] | Response:
    """Complete one prompt or several. Raises ApiError and UserError."""
    service.check_model(body.model)
    # The engine always produces a token; who wants none is not shown it.
    max_tokens = DEFAULT_MAX_TOKENS if body.max_tokens is None else max(1, body.max_tokens)
    of_prompt = body.logprobs if body.echo else None
    requests = [
        request
        for prompt in await _prompts(service, body)
        for request in service.requests(body, prompt, max_tokens, logprobs=body.logprobs, prompt_logprobs=of_prompt)
    ]
    answer = _Answer(service, body, requests)
    if body.stream:
        return await streamed(service, body, requests, http, answer.first(), answer.chunks, answer.last)
    return answer.whole(await whole(service, body, requests, http))


async def _prompts(service: Service, body: CompletionRequest) -> list[np.ndarray]:
    given = body.prompt
    is_one = isinstance(given, str) or isinstance(given[0], int)
    encode = service.served.tokenizer.encode
    return [
        await off_the_loop(partial(encode, prompt), len(prompt))
        if isinstance(prompt, str)
        else np.array(prompt, np.uint32)
        for prompt in ([given] if is_one else given)
    ]


class _Answer:
    """The parts of one response."""

    def __init__(self, service: Service, body: CompletionRequest, requests: list[Request]) -> None:
        self._body = body
        self._requests = requests
        self._decode = service.served.tokenizer.decode
        self._completions: dict[int, Completion] = {}
        self._offsets: defaultdict[int, int] = defaultdict(int)
        """Characters of each output's tokens so far."""
        self._head = {
            "id": new_id("cmpl"),
            "object": "text_completion",
            "created": now(),
            "model": service.served.name,
        }

    def whole(self, outputs: list[Output]) -> dict[str, Any]:
        """A response that is no stream."""
        choices = []
        for index, output in enumerate(outputs):
            self._completions[index] = output.completion
            echo = self._echo(index)
            self._offsets[index] = len(echo)
            choice = self._choice(index, echo + output.text, output.completion)
            choice |= self._logprobs(index, output.completion.tokens, output.completion.logprobs)
            choices.append(choice | self._pieces(output))
        return self._head | {"choices": choices, "usage": self._usage()}

    def first(self) -> list[dict[str, Any]]:
        """What a stream begins with."""
        if not self._body.echo:
            return []
        return [
            self._head | {"choices": [self._choice(index, self._echo(index), None)]}
            for index in range(len(self._requests))
        ]

    def chunks(self, delta: Delta) -> list[dict[str, Any]]:
        """What a stream says of a delta."""
        if delta.completion is not None:
            self._completions[delta.index] = delta.completion
        elif not delta.pieces and delta.logprobs is None:
            return []
        choice = self._choice(delta.index, delta.text, delta.completion) | self._pieces(delta)
        choice |= self._logprobs(delta.index, delta.tokens, delta.logprobs)
        return [self._head | {"choices": [choice]}]

    def last(self) -> list[dict[str, Any]]:
        """What a stream ends with."""
        if self._body.stream_options is None or not self._body.stream_options.include_usage:
            return []
        return [self._head | {"choices": [], "usage": self._usage()}]

    def _choice(self, index: int, text: str, completion: Completion | None) -> dict[str, Any]:
        reason, stop_reason = (None, None) if completion is None else (completion.finish_reason, completion.stop_reason)
        return {"index": index, "text": text, "logprobs": None, "finish_reason": reason, "stop_reason": stop_reason}

    def _echo(self, index: int) -> str:
        return self._decode(self._requests[index].prompt) if self._body.echo else ""

    def _logprobs(self, index: int, tokens: np.ndarray, logprobs: Logprobs | None) -> dict[str, Any]:
        if logprobs is None:
            return {}
        own = completion_logprobs(tokens, logprobs, self._decode, self._offsets[index])
        # Counted by tokens: text may come later than they do.
        self._offsets[index] += sum(map(len, own["tokens"]))
        if self._body.echo:
            before = prompt_logprobs(self._requests[index].prompt, self._completions[index], self._decode)
            own = {name: before[name] + values for name, values in own.items()}
        return {"logprobs": own}

    def _pieces(self, output: Output | Delta) -> dict[str, Any]:
        return {"pieces": [list(piece) for piece in output.pieces]} if self._body.return_drafted else {}

    def _usage(self) -> dict[str, Any]:
        prompts = [len(request.prompt) for request in self._requests[:: self._body.n]]
        return usage_of(prompts, self._completions)
