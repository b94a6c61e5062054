"""Messages between the HTTP process and the engine process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

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
    running: Literal["finish", "restart"]


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
class RequestRestarted:
    """Event: the output so far was dropped, because the weights changed."""

    request_id: int


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


@dataclass(frozen=True)
class RequestTimes:
    """Seconds that a request spent in each phase."""

    queue: float
    """From submission until it was scheduled."""
    prefill: float
    """From scheduling to the first token."""
    decode: float
    """From the first token to the last."""


@dataclass(frozen=True, eq=False)
class RequestEnded:
    """Event: a request has ended. Its tokens were sent before in `StepFinished`, unless it is a repeat."""

    request_id: int
    completion: Completion
    times: RequestTimes | None = None
    """None if the engine did not run the request."""


@dataclass(frozen=True)
class CorpusSize:
    """Size of the corpus of an embedded drafter."""

    tokens: int
    capacity: int
    """Largest number of tokens; beyond it the oldest are overwritten."""


@dataclass
class EngineStats:
    """Event: totals since the engine started, and its current load."""

    running: int = 0
    waiting: int = 0
    preemptions: int = 0
    steps: int = 0
    """Engine steps."""
    backoff_steps: int = 0
    """Engine steps in which the drafter was not called because drafting was not worthwhile recently."""
    skipped_steps: dict[str, int] = field(default_factory=dict)
    """By drafter of a combination: engine steps in which it was not called because the others offered more tokens per
    second."""
    prompt_tokens: int = 0
    """Prompt tokens of submitted requests."""
    cached_tokens: int = 0
    """Prompt tokens found in the prefix cache."""
    generated_tokens: int = 0
    sequence_steps: int = 0
    """Steps that produced tokens, counted once per sequence."""
    drafts: int = 0
    """Sequence steps that verified a draft."""
    drafted: int = 0
    accepted: int = 0
    accepted_per_position: tuple[int, ...] = ()
    """Entry i: number of drafts whose first i + 1 tokens were accepted."""
    drafted_per_position: tuple[int, ...] = ()
    """Entry i: number of drafts with at least i + 1 tokens on their longest path."""
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    """`drafted` by the name of the source, see `engine.drafters.sources`."""
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    repeated_requests: int = 0
    """Requests that were answered from the corpus. No other total includes them."""
    repeated_tokens: int = 0
    """Output tokens of these."""
    learned_tokens: int = 0
    """Tokens of finished outputs that were passed to the drafter for learning."""
    corpus: CorpusSize | None = None
    """None if the drafter has no corpus or keeps it in another process."""
    drafter_failures: int = 0
    """Number of failed calls of the drafter, and of its drafts that could not be verified."""
    is_drafter_off: bool = False
    """Whether the drafter is not called any more after repeated failures."""
    is_connected: bool | None = None
    """Whether the remote drafter is connected; None without one."""
    kv_usage: float = 0.0
    """Fraction of the KV cache's pages in use, 0 to 1."""


Command = SubmitRequest | CancelRequest | UpdateWeights | Shutdown
OutputEvent = TokensProduced | RequestRestarted | RequestEnded
"""What a request that runs yields."""
RequestEvent = RequestRestarted | RequestEnded | RequestRefused | WeightsUpdated
"""Events of one request."""
Event = EngineReady | EngineFailed | StepFinished | RequestEvent | EngineStats
