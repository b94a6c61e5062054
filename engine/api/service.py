"""What all routes share."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np

from engine.api.admission import Admission
from engine.api.cache import ResponseCache
from engine.api.engine_metrics import EngineMetrics
from engine.api.errors import ApiError
from engine.api.generation import Run, dropping_output
from engine.api.messages import Ready
from engine.api.metrics import Metrics
from engine.api.process import EngineProcess
from engine.api.schemas import SamplingFields
from engine.api.text import OutputText
from engine.models.chat import ChatPrompts
from engine.models.detokenize import Detokenizer
from engine.models.tokenizer import Tokenizer
from engine.sampling.seeds import sample_seed
from engine.scheduling.request import Request, SamplingParams

DEFAULT_MAX_TOKENS = 16
"""Of a completion whose request does not say, as in OpenAI's API."""
DEFAULT_TEMPERATURE = 1.0
"""As in OpenAI's API, unless the model's folder says something else."""
SAMPLING = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "min_tokens", "ignore_eos",
)  # fmt: skip
"""Parameters that are called alike in requests and in `SamplingParams`."""


LONG_TEXT = 10_000
"""Characters; as many take about 10 ms to tokenize."""


@dataclass(frozen=True)
class Served:
    """The model that is served."""

    name: str
    tokenizer: Tokenizer
    chat: ChatPrompts
    defaults: dict[str, Any]
    """Sampling parameters for requests that do not say, from the model's folder."""
    created: int
    drafter: str
    prefix_cache: bool


class Service:
    """The engine, its model, and who is here."""

    def __init__(
        self, engine: EngineProcess, ready: Ready, served: Served, admission: Admission, cache: ResponseCache | None
    ) -> None:
        self.engine = engine
        self._cache = cache
        self.served = served
        self.admission = admission
        pages = {
            "block_size": ready.page_size,
            "num_gpu_blocks": ready.pages,
            "enable_prefix_caching": served.prefix_cache,
        }
        self.metrics = Metrics(
            served.name, EngineMetrics(served.name, engine, admission, pages), max_tokens=ready.longest
        )
        self._ready = ready

    def described(self) -> dict[str, Any]:
        """The model as `/v1/models` lists it."""
        return {
            "id": self.served.name,
            "object": "model",
            "created": self.served.created,
            "owned_by": "ssd",
            "max_model_len": self._ready.longest,
        }

    def figures(self) -> dict[str, Any]:
        """What the page shows."""
        about = {"model": self.served.name, "drafter": self.served.drafter, "time": time.monotonic()}
        return about | asdict(self.engine.figures) | {"growth": self.engine.growth.points}

    def runner(self, body: SamplingFields, requests: Sequence[Request]) -> Run:
        """What runs the requests of a body: those that have the same output each time may come from the cache."""
        is_repeatable = body.seed is not None or not any(request.sampling.is_sampled for request in requests)
        run = partial(self._cache.run, self.engine) if self._cache is not None and is_repeatable else self.engine.run
        return dropping_output(run) if body.max_tokens == 0 else run

    def check_model(self, name: str) -> None:
        """Raises ApiError for another model than the one that is served."""
        if name != self.served.name:
            raise ApiError(
                404, f"there is no model {name!r}; this server has {self.served.name!r}", param="model",
                code="model_not_found",
            )  # fmt: skip

    def requests(self, body: SamplingFields, prompt: np.ndarray, max_tokens: int, **more: Any) -> list[Request]:
        """A request for each of the `n` outputs that a body asks for. Raises UserError."""
        given = {name: value for name in SAMPLING if (value := getattr(body, name)) is not None}
        seed = secrets.randbits(63) if body.seed is None else body.seed
        shared = {"temperature": DEFAULT_TEMPERATURE} | self.served.defaults | given | more
        return [
            Request(
                prompt,
                SamplingParams(
                    max_tokens=max_tokens,
                    seed=sample_seed(seed, index),
                    stop=_listed(body.stop),
                    stop_token_ids=tuple(body.stop_token_ids or ()),
                    logit_bias=_bias(body.logit_bias),
                    **shared,
                ),
                learn=body.learn and body.max_tokens != 0,
                salt=body.user or "",
                max_draft=body.max_draft_tokens,
            )
            for index in range(body.n)
        ]

    def text_of(self, request: Request) -> OutputText:
        """The text of a request's output, to be fed."""
        return OutputText(Detokenizer(self.served.tokenizer.decode, request.prompt), request.sampling.stop)

    def room_behind(self, prompt: np.ndarray) -> int:
        """Tokens that an output may have."""
        return max(1, self._ready.longest - len(prompt))


async def off_the_loop(encode: Callable[[], np.ndarray], characters: int) -> np.ndarray:
    """What `encode` returns; long texts are tokenized in a thread, so that the streams of others go on."""
    return encode() if characters < LONG_TEXT else await asyncio.to_thread(encode)


def new_id(kind: str) -> str:
    """Of a response."""
    return f"{kind}-{secrets.token_hex(16)}"


def now() -> int:
    """Seconds since 1970."""
    return int(time.time())


def _listed(stop: str | list[str] | None) -> tuple[str, ...]:
    return () if stop is None else (stop,) if isinstance(stop, str) else tuple(stop)


def _bias(given: dict[str, float] | None) -> dict[int, float]:
    try:
        return {int(token): bias for token, bias in (given or {}).items()}
    except ValueError:
        raise ApiError(400, "logit_bias: its keys must be token ids", param="logit_bias") from None
