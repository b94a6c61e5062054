"""Messages of the client: requests before serialization, and validated responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from drafter_service.client.history import indices_of_runs
from drafter_service.client.identity import process_name
from drafter_service.client.sequences import SequenceInfo
from drafter_service.observability.process import own_version
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import DTYPES, PROTOCOL, SHAPE_CODES, check_engine_name, pack, read_drafts
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DraftShape
from ssd.corpus.ring import any_of, has_invalid_token
from ssd.corpus.rollout import Rollout
from ssd.types import ROOT, DraftBatch, offsets_of

if TYPE_CHECKING:  # It imports numba.
    from drafter_service.observability.facts import ModelIdentity

U1, U4, I4, F4 = (DTYPES[name] for name in ("u1", "u4", "i4", "f4"))

ONE_AS_BITS = np.float32(1.0).view(np.uint32)
"""Bits of 1.0: as unsigned integers, floats from 0 to 1 are at most this; negative, greater and NaN are above."""

PATH_PARENTS = [np.arange(ROOT, size + ROOT, dtype=I4).tobytes() for size in range(129)]
"""Parents of paths, i32, by their number of tokens."""


class RefusedError(Exception):
    """The service refuses this client; the text is its reason."""


class Registered(NamedTuple):
    """A sequence to register. Its arrays are final."""

    wire_id: int
    info: SequenceInfo
    committed: np.ndarray
    """uint32 [n]."""


class Ended(NamedTuple):
    """The end of a sequence, with its unsent tokens."""

    wire_id: int
    tokens: np.ndarray
    """uint32 [n], final."""
    learn: bool
    verified: int
    steps: int


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request and its texts, which the thread that writes the bytes copies into it."""

    request: pb.DraftRequest = field(default_factory=pb.DraftRequest)
    starts: list[Registered] = field(default_factory=list)
    finishes: list[Ended] = field(default_factory=list)

    @property
    def text_bytes(self) -> int:
        """Bytes of the texts."""
        if not self.starts and not self.finishes:
            return 0
        started = sum(4 * start.info.size + start.committed.nbytes for start in self.starts)
        return started + sum(finish.tokens.nbytes for finish in self.finishes)

    def message(self) -> pb.DraftRequest:
        """Return the complete request. May be called once."""
        for start in self.starts:
            self.request.starts.add(
                sequence_id=start.wire_id,
                prompt=pack(start.info.prompt, "u4"),
                hints=pack(start.info.hints, "u4"),
                committed=pack(start.committed, "u4"),
                session_id=start.info.session_id,
                request_id=start.info.request_id,
                learn=start.info.learn,
                shadow=start.info.shadow,
                rollout=rollout_message(start.info.rollout),
                seed=start.info.seed,
            )
        for finish in self.finishes:
            self.request.finishes.add(
                sequence_id=finish.wire_id,
                tokens=pack(finish.tokens, "u4"),
                learn=finish.learn,
                verified=finish.verified,
                steps=finish.steps,
            )
        return self.request


def rollout_message(rollout: Rollout | None) -> pb.Rollout | None:
    """Return the message of a rollout."""
    return None if rollout is None else pb.Rollout(group=rollout.group, version=rollout.version)


@dataclass(frozen=True)
class Welcome:
    """What the service allows a client, as it says when they connect."""

    namespace: str
    may_learn: bool
    """Whether the service learns from this client."""
    max_draft: int
    """Maximum number of tokens in a draft."""
    max_sequences: int
    """Maximum number of running sequences that have drafts; 0: unknown."""
    max_tokens: int
    """Maximum sum of their tokens, prompts included; 0: unknown."""


@dataclass
class Counters:
    """Totals since the client was made."""

    timeouts: int = 0
    """Late steps: steps without drafts because the service was late, or was not called after it had been late."""
    dropped: int = 0
    """Responses that arrived after the deadline."""
    resyncs: int = 0
    """Running sequences that were registered again because the service had lost them."""
    reconnects: int = 0
    """Connections after the first."""
    malformed: int = 0
    """Drafts that were too long, outside the vocabulary, or not well formed."""
    unlearned: int = 0
    """Finished sequences that were discarded instead of learned, because the queue was full."""

    def message(self) -> pb.ClientCounters:
        """Return the counters that are sent to the service."""
        return pb.ClientCounters(
            timeouts=self.timeouts, dropped=self.dropped, resyncs=self.resyncs, reconnects=self.reconnects
        )


def hello_message(
    model: ModelIdentity | None,
    namespace: str,
    host: str = "",
    draft_shape: DraftShape | None = None,
    padding: Padding = NO_PADDING,
    engine: str = "",
) -> pb.Hello:
    """Return the first message of a stream: versions of host and client, the served model, shapes of drafts and steps.

    engine: name of the engine; "" for `process_name`. Raises ValueError for an unknown shape, and for an invalid name.
    """
    check_engine_name(engine)
    if draft_shape not in SHAPE_CODES:
        raise ValueError(f"draft_shape must be 'path', 'tree' or None, not {draft_shape!r}")
    return pb.Hello(
        protocol=PROTOCOL,
        client=f"{host} ssd-drafter/{own_version()}".strip(),
        model=pb.Model() if model is None else pb.Model(**vars(model)),
        namespace=namespace,
        draft_shape=SHAPE_CODES[draft_shape],
        step_sizes=pack(np.array(padding.sizes, np.uint32), "u4"),
        draft_lengths=pack(np.array(padding.lengths, np.uint32), "u4"),
        engine=engine or process_name(),
    )


def read_draft_response(message: pb.Drafts, limits: np.ndarray, vocab_size: int) -> tuple[DraftBatch, int]:
    """Return the well-formed drafts, with at most `limits` tokens each, uint32 [B], and the number of malformed ones.

    Token ids must be below `vocab_size`, unless that is 0. Malformed drafts become empty. Raises WireError for
    inconsistent arrays.
    """
    paths = _read_valid_paths(message, limits, vocab_size)
    if paths is not None:
        return paths, 0
    return _remove_malformed(read_drafts(message, len(limits)), limits.astype(np.int64), vocab_size)


def _read_valid_paths(message: pb.Drafts, limits: np.ndarray, vocab_size: int) -> DraftBatch | None:
    """Return the drafts if all are well-formed paths, the usual case; takes a fifth of the general check's time."""
    try:
        tokens, bits = np.frombuffer(message.tokens, U4), np.frombuffer(message.accept_prob, U4)
        source, offsets = np.frombuffer(message.source, U1), np.frombuffer(message.offsets, U4)
    except ValueError:
        return None
    count, parents = len(tokens), message.parents
    if not count == len(bits) == len(source) or len(offsets) != len(limits) + 1:
        return None
    if offsets[0] != 0 or offsets[-1] != count:
        return None
    sizes = offsets[1:] - offsets[:-1]
    # A negative size, where offsets decrease, is above any limit as an unsigned number.
    if any_of(sizes > limits) or any_of(bits > ONE_AS_BITS) or has_invalid_token(tokens, vocab_size):
        return None
    try:
        are_paths = b"".join([PATH_PARENTS[size] for size in sizes.tolist()]) == parents
    except IndexError:  # A longer draft.
        return None
    if not are_paths:
        return None
    return DraftBatch(tokens, np.frombuffer(parents, I4), bits.view(F4), source, offsets, message.pause_steps)


def _remove_malformed(drafts: DraftBatch, limits: np.ndarray, vocab_size: int) -> tuple[DraftBatch, int]:
    """Return the drafts with malformed ones emptied, and the number of these."""
    offsets = drafts.offsets.astype(np.int64)
    sizes = offsets[1:] - offsets[:-1]
    index = indices_of_runs(np.zeros(len(sizes), np.int64), offsets)
    is_valid = (drafts.parents >= ROOT) & (drafts.parents < index)
    is_valid &= (drafts.accept_prob >= 0) & (drafts.accept_prob <= 1)
    if vocab_size:
        is_valid &= drafts.tokens < vocab_size
    invalid_before = np.concatenate(([0], np.cumsum(~is_valid)))
    is_kept = (invalid_before[offsets[1:]] == invalid_before[offsets[:-1]]) & (sizes <= limits)
    keep, sizes = is_kept.repeat(sizes), sizes * is_kept
    kept = DraftBatch(
        drafts.tokens[keep],
        drafts.parents[keep],
        drafts.accept_prob[keep],
        drafts.source[keep],
        offsets_of(sizes),
        drafts.pause_steps,
    )
    return kept, len(sizes) - int(np.count_nonzero(is_kept))
