"""Outputs of deterministic requests, kept for exact repeats: the same input gets the same output without the model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import astuple, replace

from engine.api.messages import Ended, Produced
from engine.api.process import EngineProcess
from engine.scheduling.request import Completion, Request


class ResponseCache:
    """The latest outputs, of at most so many tokens together, prompts included. The event loop alone uses it."""

    def __init__(self, most_tokens: int) -> None:
        self.hits = 0
        self._most = most_tokens
        self._kept: OrderedDict[tuple[object, ...], Completion] = OrderedDict()
        self._tokens = 0

    async def run(self, engine: EngineProcess, request: Request) -> AsyncGenerator[Produced | Ended, None]:
        """As `EngineProcess.run`, for a request that has the same output each time."""
        key = _key(request)
        kept = self._kept.get(key)
        if kept is not None:
            self.hits += 1
            self._kept.move_to_end(key)
            if len(kept.tokens):
                yield Produced(0, kept.tokens, 0, len(kept.content), kept.logprobs)
            yield Ended(0, replace(kept, steps=0, drafted=0, accepted=0))
            return
        async with aclosing(engine.run(request)) as events:
            async for event in events:
                if isinstance(event, Ended):
                    self._keep(key, request, event.completion)
                yield event

    def _keep(self, key: tuple[object, ...], request: Request, completion: Completion) -> None:
        size = len(request.prompt) + len(completion.tokens)
        if size > self._most or key in self._kept:
            return
        self._kept[key] = completion
        self._tokens += size
        while self._tokens > self._most:
            old, dropped = self._kept.popitem(last=False)
            self._tokens -= _prompt_tokens(old) + len(dropped.tokens)


def _key(request: Request) -> tuple[object, ...]:
    """All that an output depends on, and whose it is: nobody is told what others asked."""
    sampling = request.sampling if request.sampling.is_sampled else replace(request.sampling, seed=0)
    return request.salt, request.prompt.tobytes(), repr(astuple(sampling))


def _prompt_tokens(key: tuple[object, ...]) -> int:
    prompt = key[1]
    assert isinstance(prompt, bytes)
    return len(prompt) // 4
