"""State that all routes share: the engine process, the served model, admission and metrics."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from engine.api.engine_process import EngineProcess
from engine.api.errors import ApiError
from engine.api.grammar_checker import GrammarChecker
from engine.api.messages import EngineReady
from engine.api.metrics import EngineCollector, Metrics
from engine.api.repeats import request_id_of
from engine.api.schemas import SamplingFields
from engine.api.tool_formats import ToolFormat
from engine.models.tokenizer import LONG_TEXT, ChatPrompts, Tokenizer
from engine.sampling.grammar import Grammar
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams, parse_drafters, sample_seed

DEFAULT_MAX_TOKENS = 16
"""Limit of a completion that does not set one, as in OpenAI's API."""
DEFAULT_TEMPERATURE = 1.0
"""OpenAI's default; the model's folder may recommend another."""
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos", "verification",
)  # fmt: skip
"""Parameters with the same name in requests and in `SamplingParams`."""


@dataclass(frozen=True)
class ServedModel:
    """The model that the server serves."""

    name: str
    tokenizer: Tokenizer
    chat: ChatPrompts
    defaults: dict[str, float]
    """Sampling parameters that the model's folder recommends, for requests that do not set them."""
    created: int
    """Unix time."""
    drafter: str
    adapters: tuple[str, ...] = ()
    """Names of LoRA adapters, which requests choose as their model."""
    tool_format: ToolFormat | None = None
    """How the model writes tool calls; None if that is not known."""
    answers_repeats: bool = False
    """Whether repeated requests are answered from the corpus, see `engine.api.repeats`."""


class Service:
    """State and operations that the routes share."""

    def __init__(self, engine: EngineProcess, ready: EngineReady, served: ServedModel, max_requests: int) -> None:
        """max_requests: largest number of running and waiting requests; more are refused immediately."""
        self.engine = engine
        self.served = served
        self._max_requests = max_requests
        self._checking = 0
        """Number of requests whose grammars are being checked."""
        collector = EngineCollector(served.name, lambda: engine.stats)
        self.metrics = Metrics(served.name, collector, max_tokens=ready.window.tokens)
        self._grammars = GrammarChecker(GrammarCompiler(served.tokenizer, ready.vocab_size, ready.end_tokens))
        self.window = ready.window
        """Largest number of tokens of a prompt plus its output."""

    def close(self) -> None:
        """End the process that checks grammars, after the running checks."""
        self._grammars.close()

    @property
    def models(self) -> tuple[str, ...]:
        """Names that requests may give: the model and its adapters."""
        return (self.served.name, *self.served.adapters)

    def model_entry(self, name: str) -> dict[str, Any]:
        """Return the entry of the model or of an adapter in `/v1/models`. Raises ApiError for other names."""
        self.check_model(name)
        entry = {
            "id": name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "ssd",
            "max_model_len": self.window.tokens,
            "drafters": self.served.drafter.split("+"),
        }
        return entry if name == self.served.name else entry | {"parent": self.served.name}

    def figures(self) -> dict[str, Any]:
        """Return the data of the status page."""
        header = {"model": self.served.name, "drafter": self.served.drafter, "time": time.monotonic()}
        return header | asdict(self.engine.stats)

    async def check_grammar(self, grammar: Grammar | None, requests: int) -> None:
        """Raise UserError for a grammar that cannot be used. requests: number of those that wait for the check."""
        if grammar is None:
            return
        self._checking += requests
        try:
            await self._grammars.check(grammar)
        finally:
            self._checking -= requests

    def admit(self, requests: int) -> None:
        """Raise ApiError: 400 if this many requests can never be admitted, 429 if there is no room now.

        Finished requests whose response is still being sent do not count.
        """
        most, present = self._max_requests, self.engine.open_requests + self._checking
        if requests > most:
            raise ApiError(400, f"n: that is {requests} outputs, and the server takes {most} at a time", param="n")
        if present + requests > most:
            raise ApiError(429, f"the server has {present} requests and takes {most}; try again later")

    def check_model(self, name: str) -> None:
        """Raise ApiError for a model that is not served."""
        if name not in self.models:
            known = ", ".join(map(repr, self.models))
            raise ApiError(
                404, f"there is no model {name!r}; this server has {known}", param="model",
                code="model_not_found",
            )  # fmt: skip

    async def hints(self, body: SamplingFields) -> np.ndarray | None:
        """Return the token ids of the predicted output, uint32 [H]; None without one."""
        if body.prediction is None:
            return None
        text = body.prediction.text
        return await encode_in_background(partial(self.served.tokenizer.encode, text), len(text))

    def output_limit(self, prompt: np.ndarray, given: int | None, default: int, param: str) -> int:
        """Return the maximum number of output tokens after a prompt, uint32 [P]; param: name of the field with `given`.

        Raises ApiError if prompt and output would exceed the context window.
        """
        room = self.window.tokens - len(prompt)
        if given is None:
            return max(1, min(default, room))
        if 0 < room < given:
            raise ApiError(
                400, f"{param}: {given} exceeds the {room} tokens that the prompt of {len(prompt)} leaves in the "
                f"context window of {self.window}", param=param, code="context_length_exceeded",
            )  # fmt: skip
        return given

    def requests(
        self, body: SamplingFields, prompt: np.ndarray, max_tokens: int, hints: np.ndarray | None = None, **more: Any
    ) -> list[Request]:
        """Return a request for each of the `n` outputs of a prompt, uint32 [P]; hints: see `Request`.

        Raises UserError.
        """
        given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        seed = secrets.randbits(63) if body.seed is None else body.seed
        stop_token_ids = tuple(dict.fromkeys(body.stop_token_ids or ()))
        shared = {"temperature": DEFAULT_TEMPERATURE, "grammar": body.grammar} | self.served.defaults | given | more
        made = [
            Request(
                prompt,
                SamplingParams(
                    max_tokens=max_tokens,
                    seed=sample_seed(seed, index),
                    stop=_stop_strings(body.stop),
                    stop_token_ids=stop_token_ids,
                    logit_bias=_logit_bias(body.logit_bias),
                    **shared,
                ),
                learn=body.learn,
                salt=repr((body.user, body.cache_salt)) if body.cache_salt else body.user or "",
                drafters=None if body.drafter is None else parse_drafters(body.drafter),
                max_draft=body.max_draft,
                hints=hints,
                rollout=None if body.rollout is None else body.rollout.value,
                adapter=body.model if body.model in self.served.adapters else None,
            )
            for index in range(body.n)
        ]
        is_fixed = body.seed is not None or not made[0].sampling.is_sampled
        has_logprobs = made[0].sampling.logprobs is not None or made[0].sampling.prompt_logprobs is not None
        must_run = not is_fixed or has_logprobs or body.n > 1 or body.return_token_ids
        if not self.served.answers_repeats or must_run:
            return made
        return [replace(made[0], request_id=request_id_of(made[0]))]


async def encode_in_background(encode: Callable[[], np.ndarray], characters: int) -> np.ndarray:
    """Call `encode`; for long texts in a thread, so that the event loop is not blocked."""
    return encode() if characters < LONG_TEXT else await asyncio.to_thread(encode)


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: its keys must be token ids", param="logit_bias") from None
