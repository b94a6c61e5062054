"""Messages of the client: requests until their bytes are made, and checked responses."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import version
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from drafter_service.client.history import indices_of_runs
from drafter_service.client.sequences import SequenceInfo
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import DTYPES, PROTOCOL, pack, read_drafts
from ssd.types import ROOT, DraftBatch, offsets_of

if TYPE_CHECKING:  # It imports numba.
    from drafter_service.observability.facts import ModelIdentity

U1, U4, I4, F4 = (DTYPES[name] for name in ("u1", "u4", "i4", "f4"))

ONE_AS_BITS = np.float32(1.0).view(np.uint32)
"""As integers, floats from 0 to 1 are at most this; negative ones, greater ones and NaN are more."""

TOKEN_LIMIT = np.uint32(0xFFFF_FFFF)
"""The first id that no token can have."""


class RefusedError(Exception):
    """The service does not serve this client; the text is its reason."""


class Registered(NamedTuple):
    """A sequence to register. Its arrays do not change any more."""

    wire_id: int
    info: SequenceInfo
    committed: np.ndarray
    """uint32 [n]."""


class Ended(NamedTuple):
    """The end of a sequence, with the tokens that the service was not sent."""

    wire_id: int
    tokens: np.ndarray
    """uint32 [n]; they do not change any more."""
    learn: bool
    verified: int
    steps: int


@dataclass(slots=True, eq=False)
class OutgoingRequest:
    """A request without its token texts, and these texts. The thread that writes the bytes copies them in."""

    request: pb.DraftRequest = field(default_factory=pb.DraftRequest)
    starts: list[Registered] = field(default_factory=list)
    finishes: list[Ended] = field(default_factory=list)

    @property
    def text_bytes(self) -> int:
        """Bytes of the texts."""
        if not self.starts and not self.finishes:
            return 0
        started = sum(start.info.prompt.nbytes + start.committed.nbytes for start in self.starts)
        return started + sum(finish.tokens.nbytes for finish in self.finishes)

    def message(self) -> pb.DraftRequest:
        """Return the whole request. To be called once."""
        for start in self.starts:
            self.request.starts.add(
                sequence_id=start.wire_id,
                prompt=pack(start.info.prompt, "u4"),
                committed=pack(start.committed, "u4"),
                session_id=start.info.session_id,
                request_id=start.info.request_id,
                learn=start.info.learn,
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


@dataclass
class Counters:
    """Totals since the client was made."""

    timeouts: int = 0
    """Steps without drafts because the service was late, or had been late and was not asked."""
    dropped: int = 0
    """Responses that came too late."""
    resyncs: int = 0
    """Running sequences that the service lost, so that they had to be registered again."""
    reconnects: int = 0
    """Connections that were made again."""
    malformed: int = 0
    """Drafts that were too long, outside the vocabulary, or not well formed."""
    unlearned: int = 0
    """Finished sequences that were discarded, though they were to be learned, because the queue was full."""

    transport: str = ""
    """What the connection uses now: "socket" for the step socket, "grpc", or "" while there is none."""

    def message(self) -> pb.ClientCounters:
        """Return what the service is sent of them."""
        return pb.ClientCounters(
            timeouts=self.timeouts, dropped=self.dropped, resyncs=self.resyncs, reconnects=self.reconnects
        )


def hello_message(model: ModelIdentity | None, namespace: str, policy: str) -> pb.Hello:
    """Return the first message of a stream: the client's version and what is served."""
    described = pb.Model()
    if model is not None:
        described = pb.Model(
            name=model.name,
            tokenizer=model.tokenizer,
            adapter=model.adapter,
            vocabulary_size=model.vocabulary_size,
        )
    return pb.Hello(
        protocol=PROTOCOL,
        client=f"ssd-drafter/{version('ssd-drafter')}",
        model=described,
        namespace=namespace,
        policy=policy,
    )


def read_draft_response(message: pb.Drafts, limits: np.ndarray, vocabulary_size: int) -> tuple[DraftBatch, int]:
    """Return the well-formed drafts, with at most `limits` tokens each, uint32 [B], and the number of the others.

    Token ids must be below `vocabulary_size`, unless that is 0. Drafts that are not well formed are empty. Raises
    WireError for arrays that do not fit together.
    """
    paths = _read_valid_paths(message, limits, vocabulary_size)
    if paths is not None:
        return paths, 0
    return _remove_malformed(read_drafts(message, len(limits)), limits.astype(np.int64), vocabulary_size)


def _read_valid_paths(message: pb.Drafts, limits: np.ndarray, vocabulary_size: int) -> DraftBatch | None:
    """Return the drafts if all are well-formed paths, as nearly always; takes a third of the general check's time."""
    try:
        tokens, accept_prob = np.frombuffer(message.tokens, U4), np.frombuffer(message.accept_prob, F4)
        parents, source = np.frombuffer(message.parents, I4), np.frombuffer(message.source, U1)
        offsets = np.frombuffer(message.offsets, U4)
    except ValueError:
        return None
    count = len(tokens)
    if not count == len(accept_prob) == len(parents) == len(source) or len(offsets) != len(limits) + 1:
        return None
    if offsets[0] != 0 or offsets[-1] != count:
        return None
    sizes = offsets[1:] - offsets[:-1]
    # A negative size, where offsets decrease, is above any limit as an unsigned number.
    if np.count_nonzero(sizes > limits):
        return None
    follows = parents == np.arange(count) - (offsets[:-1] + np.int64(1)).repeat(sizes)
    is_valid = follows & (accept_prob.view(np.uint32) <= ONE_AS_BITS) & (tokens < (vocabulary_size or TOKEN_LIMIT))
    if np.count_nonzero(is_valid) < count:
        return None
    return DraftBatch(tokens, parents, accept_prob, source, offsets)


def _remove_malformed(drafts: DraftBatch, limits: np.ndarray, vocabulary_size: int) -> tuple[DraftBatch, int]:
    """Make drafts empty that are not well formed; returns how many were."""
    offsets = drafts.offsets.astype(np.int64)
    sizes = offsets[1:] - offsets[:-1]
    index = indices_of_runs(np.zeros(len(sizes), np.int64), offsets)
    is_valid = (drafts.parents >= ROOT) & (drafts.parents < index)
    is_valid &= (drafts.accept_prob >= 0) & (drafts.accept_prob <= 1)
    if vocabulary_size:
        is_valid &= drafts.tokens < vocabulary_size
    invalid_before = np.concatenate(([0], np.cumsum(~is_valid)))
    is_kept = (invalid_before[offsets[1:]] == invalid_before[offsets[:-1]]) & (sizes <= limits)
    keep, sizes = is_kept.repeat(sizes), sizes * is_kept
    kept = DraftBatch(
        drafts.tokens[keep], drafts.parents[keep], drafts.accept_prob[keep], drafts.source[keep], offsets_of(sizes)
    )
    return kept, len(sizes) - int(np.count_nonzero(is_kept))
