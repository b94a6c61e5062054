"""Cache the outputs of deterministic requests, so that exact repeats do not run the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import astuple, replace

from engine.api.engine_process import EngineProcess
from engine.api.messages import RequestEnded, TokensProduced
from engine.scheduling.request import Completion, Request


class ResponseCache:
    """LRU cache of outputs, bounded by the tokens of prompts and outputs. Use it from a single event loop."""

    def __init__(self, max_tokens: int) -> None:
        self.hits = 0
        self._max_tokens = max_tokens
        self._completions: OrderedDict[tuple[object, ...], Completion] = OrderedDict()
        self._tokens = 0

    async def run(self, engine: EngineProcess, request: Request) -> AsyncGenerator[TokensProduced | RequestEnded, None]:
        """Yield the events of a deterministic request like `EngineProcess.run`, from the cache if possible."""
        key = _key(request)
        cached = self._completions.get(key)
        if cached is not None:
            self.hits += 1
            self._completions.move_to_end(key)
            if len(cached.tokens):
                yield TokensProduced(0, cached.tokens, 0, len(cached.content), cached.logprobs)
            yield RequestEnded(0, replace(cached, steps=0, drafted=0, accepted=0, by_source={}))
            return
        async with aclosing(engine.run(request)) as events:
            async for event in events:
                if isinstance(event, RequestEnded):
                    self._insert(key, request, event.completion)
                yield event

    def _insert(self, key: tuple[object, ...], request: Request, completion: Completion) -> None:
        size = len(request.prompt) + len(completion.tokens)
        if size > self._max_tokens or key in self._completions:
            return
        self._completions[key] = completion
        self._tokens += size
        while self._tokens > self._max_tokens:
            evicted_key, evicted = self._completions.popitem(last=False)
            self._tokens -= _prompt_tokens(evicted_key) + len(evicted.tokens)


def _key(request: Request) -> tuple[object, ...]:
    """Return everything that the output depends on, and the salt, which isolates tenants from each other.

    Accepted drafts change the output in rejection mode.
    """
    sampling = request.sampling if request.sampling.is_sampled else replace(request.sampling, seed=0)
    choices = repr(astuple(sampling)), request.adapter, request.drafters, request.max_draft
    return request.salt, request.prompt.tobytes(), *choices


def _prompt_tokens(key: tuple[object, ...]) -> int:
    prompt = key[1]
    assert isinstance(prompt, bytes)
    return len(prompt) // 4  # uint32
