"""Messages between the HTTP process and the engine process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Literal, NamedTuple

import numpy as np

from engine.config import ContextWindow
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request


@dataclass(frozen=True)
class SubmitRequest:
    """Command: run a request."""

    request_id: int
    request: Request


@dataclass(frozen=True)
class CancelRequest:
    """Command: stop a request whose output is no longer wanted."""

    request_id: int


@dataclass(frozen=True)
class UpdateWeights:
    """Command: replace the weights, see `Engine.update_weights`. The answer has the same id as this request."""

    request_id: int
    path: str
    version: int | None


@dataclass(frozen=True)
class Shutdown:
    """Command: end the process."""


@dataclass(frozen=True)
class EngineReady:
    """Event: the engine has loaded its model."""

    vocab_size: int
    window: ContextWindow
    """Largest number of tokens of a prompt plus its output."""
    end_tokens: tuple[int, ...]
    """Ids of the model's tokens that end an output."""


@dataclass(frozen=True)
class EngineFailed:
    """Event: the engine could not start or has stopped."""

    reason: str


@dataclass(frozen=True)
class RequestRefused:
    """Event: a request cannot run, or cannot continue because of its adapter or its grammar."""

    request_id: int
    reason: str


@dataclass(frozen=True)
class WeightsUpdated:
    """Event: the new weights are in use."""

    request_id: int
    version: int


class TokensProduced(NamedTuple):
    """Tokens that one step produced for a request."""

    tokens: np.ndarray
    """uint32 [n]."""
    accepted: int
    """Number of leading tokens that are accepted draft tokens."""
    visible: int
    """Number of leading tokens that are part of the text; a token that ends the output is not."""
    logprobs: Logprobs | None
    """Log-probabilities of `tokens`, if requested."""


@dataclass(frozen=True, eq=False)
class StepFinished:
    """Event: a step produced tokens for P requests."""

    request_ids: np.ndarray
    """int64 [P]."""
    offsets: np.ndarray
    """uint32 [P + 1]: request i has the tokens `tokens[offsets[i]:offsets[i + 1]]`."""
    tokens: np.ndarray
    """uint32 [T]."""
    accepted: np.ndarray
    """int64 [P], see `TokensProduced`."""
    visible: np.ndarray
    """int64 [P], see `TokensProduced`."""
    logprobs: dict[int, Logprobs]
    """By index of the request, for those that have any."""

    def parts(self) -> Iterator[tuple[int, TokensProduced]]:
        """Yield the id of each request, and its part, whose tokens are a view."""
        columns = (self.request_ids, self.offsets, self.offsets[1:], self.accepted, self.visible)
        rows = zip(*(column.tolist() for column in columns), strict=False)
        for index, (request_id, start, end, accepted, visible) in enumerate(rows):
            yield request_id, TokensProduced(self.tokens[start:end], accepted, visible, self.logprobs.get(index))


@dataclass(frozen=True, eq=False)
class RequestEnded:
    """Event: a request has ended. Its tokens were sent before in `StepFinished`, unless it is a repeat."""

    request_id: int
    completion: Completion


@dataclass(frozen=True)
class CorpusSize:
    """Size of the corpus of an embedded drafter."""

    tokens: int
    capacity: int
    """Largest number of tokens; beyond it the oldest are overwritten."""


class Series(NamedTuple):
    """A Prometheus metric that a field of `EngineStats` has."""

    kind: Literal["gauge", "counter"]
    name: str
    text: str
    label: str = ""
    """Label by which the values of a mapping or of a tuple are told apart."""


@dataclass
class EngineStats:
    """Event: totals since the engine started, and its current load."""

    running: Annotated[int, Series("gauge", "vllm:num_requests_running", "Running requests.")] = 0
    waiting: Annotated[int, Series("gauge", "vllm:num_requests_waiting", "Waiting requests.")] = 0
    preemptions: Annotated[
        int, Series("counter", "vllm:num_preemptions", "Requests whose pages were freed, to be computed again later.")
    ] = 0
    steps: Annotated[int, Series("counter", "ssd:engine_steps", "Engine steps.")] = 0
    backoff_steps: Annotated[
        int, Series("counter", "ssd:backoff_steps", "Engine steps without drafting, because it was not worthwhile.")
    ] = 0
    skipped_steps: Annotated[
        dict[str, int],
        Series(
            "counter",
            "ssd:skipped_steps",
            "Engine steps in which a drafter of a combination was not called, because the others offered more.",
            "drafter",
        ),
    ] = field(default_factory=dict)
    prompt_tokens: Annotated[
        int,
        Series("counter", "vllm:prompt_tokens", "Prompt tokens."),
        Series("counter", "vllm:prefix_cache_queries", "Tokens looked up in the prefix cache."),
    ] = 0
    cached_tokens: Annotated[int, Series("counter", "vllm:prefix_cache_hits", "Tokens found in the prefix cache.")] = 0
    generated_tokens: Annotated[int, Series("counter", "vllm:generation_tokens", "Output tokens.")] = 0
    sequence_steps: int = 0
    """Steps that produced tokens, counted once per sequence."""
    drafts: Annotated[int, Series("counter", "vllm:spec_decode_num_drafts", "Verified drafts.")] = 0
    drafted: Annotated[int, Series("counter", "vllm:spec_decode_num_draft_tokens", "Verified draft tokens.")] = 0
    accepted: Annotated[int, Series("counter", "vllm:spec_decode_num_accepted_tokens", "Accepted draft tokens.")] = 0
    accepted_per_position: Annotated[
        tuple[int, ...],
        Series(
            "counter",
            "vllm:spec_decode_num_accepted_tokens_per_pos",
            "Accepted draft tokens by position in the draft.",
            "position",
        ),
    ] = ()
    """Entry i: number of drafts whose first i + 1 tokens were accepted."""
    drafted_per_position: tuple[int, ...] = ()
    """Entry i: number of drafts with at least i + 1 tokens on their longest path."""
    drafted_by_source: Annotated[
        dict[str, int],
        Series("counter", "ssd:draft_tokens", "Draft tokens by the source that proposed them.", "source"),
    ] = field(default_factory=dict)
    """By the name of the source, see `engine.drafters.sources`."""
    accepted_by_source: Annotated[
        dict[str, int], Series("counter", "ssd:accepted_tokens", "Accepted draft tokens by source.", "source")
    ] = field(default_factory=dict)
    repeated_requests: Annotated[
        int, Series("counter", "ssd:repeated_requests", "Requests answered from the corpus, not run.")
    ] = 0
    """No other total includes these requests."""
    repeated_tokens: Annotated[
        int, Series("counter", "ssd:repeated_tokens", "Output tokens of requests answered from the corpus.")
    ] = 0
    learned_tokens: Annotated[
        int, Series("counter", "ssd:learned_tokens", "Output tokens passed to the drafter to remember.")
    ] = 0
    corpus: Annotated[CorpusSize | None, Series("gauge", "ssd:corpus_tokens", "Tokens in the corpus.")] = None
    """None if the drafter has no corpus or keeps it in another process."""
    drafter_failures: Annotated[
        int, Series("counter", "ssd:drafter_failures", "Failed calls of the drafter, and its invalid drafts.")
    ] = 0
    is_drafter_off: Annotated[
        bool, Series("gauge", "ssd:drafter_off", "1 if the drafter is switched off after repeated failures.")
    ] = False
    is_connected: Annotated[
        bool | None,
        Series("gauge", "ssd:drafter_connected", "1 if the remote drafter was connected after the last step, else 0."),
    ] = None
    """None without a remote drafter."""
    kv_usage: Annotated[
        float, Series("gauge", "vllm:kv_cache_usage_perc", "Share of the KV cache's pages in use, 1 for all.")
    ] = 0.0


Command = SubmitRequest | CancelRequest | UpdateWeights | Shutdown
OutputEvent = TokensProduced | RequestEnded
"""What a request that runs yields."""
RequestEvent = RequestEnded | RequestRefused | WeightsUpdated
"""Events of one request."""
Event = EngineReady | EngineFailed | StepFinished | RequestEvent | EngineStats
