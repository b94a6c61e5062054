"""Between messages and arrays: packs, unpacks, and checks everything that came over the wire.

The only place that knows how an array travels. A message that passes here is safe to use.
"""

from __future__ import annotations

import numpy as np

from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus.ring import MAX_TOKEN_ID
from ssd.types import DraftBatch, Progress

MAX_MESSAGE_BYTES = 64 << 20
"""Largest message either side accepts: a batch of starts with prompts of millions of tokens."""

DTYPES = {name: np.dtype(f"<{name}") for name in ("u1", "u4", "u8", "i4", "f4", "f8")}
"""As numpy spells them, and as they travel."""


class WireError(ValueError):
    """A message is malformed; the text names the field and says what is wrong with it."""


def pack(array: np.ndarray, dtype: str) -> bytes:
    """An array as packed little-endian bytes; `dtype` as in numpy, such as "u4"."""
    wanted = DTYPES[dtype]
    return (array if array.dtype is wanted else array.astype(wanted, copy=False)).tobytes()


def unpack(data: bytes, dtype: str, field: str) -> np.ndarray:
    """Packed little-endian bytes as a read-only array. Raises WireError if they are no whole number of elements."""
    wire = DTYPES[dtype]
    if len(data) % wire.itemsize:
        raise WireError(f"{field} has {len(data)} bytes, not a multiple of {wire.itemsize}")
    array = np.frombuffer(data, wire)
    return array if wire.isnative else array.astype(dtype)


def unpack_tokens(data: bytes, field: str) -> np.ndarray:
    """Token ids, uint32. Raises WireError for the reserved one."""
    tokens = unpack(data, "u4", field)
    if len(tokens) and int(tokens.max()) > MAX_TOKEN_ID:
        raise WireError(f"{field} holds the token id {int(tokens.max())}; the largest possible is {MAX_TOKEN_ID}")
    return tokens


def batch_message(progress: Progress) -> pb.Batch:
    """A step's progress as a message."""
    return pb.Batch(
        sequence_ids=pack(progress.sequence_ids, "u8"),
        tokens=pack(progress.tokens, "u4"),
        offsets=pack(progress.offsets, "u4"),
        verified=pack(progress.verified, "u4"),
        max_draft=pack(progress.max_draft, "u4"),
        cost=progress.cost,
    )


def read_batch(message: pb.Batch) -> Progress:
    """A step's progress. Raises WireError for arrays that do not fit together."""
    sequence_ids = unpack(message.sequence_ids, "u8", "batch.sequence_ids")
    sequences = len(sequence_ids)
    if len(set(sequence_ids.tolist())) != sequences:
        raise WireError("batch.sequence_ids names a sequence twice")
    tokens = unpack_tokens(message.tokens, "batch.tokens")
    offsets = _read_offsets(message.offsets, sequences, len(tokens), "batch")
    counts = {
        name: _of_length(unpack(getattr(message, name), "u4", f"batch.{name}"), sequences, f"batch.{name}")
        for name in ("verified", "max_draft")
    }
    cost = message.cost if message.HasField("cost") else None
    if cost is not None and not 0 < cost <= 1:
        raise WireError(f"batch.cost is {cost}; it is a part of a step, above 0 to 1")
    return Progress(sequence_ids, tokens, offsets, **counts, cost=cost)


def drafts_message(drafts: DraftBatch) -> pb.Drafts:
    """Drafts as a message."""
    return pb.Drafts(
        tokens=pack(drafts.tokens, "u4"),
        parents=pack(drafts.parents, "i4"),
        odds=pack(drafts.accept_prob, "f4"),
        source=pack(drafts.source, "u1"),
        offsets=pack(drafts.offsets, "u4"),
    )


def read_drafts(message: pb.Drafts, sequences: int) -> DraftBatch:
    """Drafts for a batch of `sequences`. Raises WireError for arrays that do not fit together."""
    tokens = unpack_tokens(message.tokens, "drafts.tokens")
    parents, accept_prob, source = (
        _of_length(unpack(getattr(message, name), dtype, f"drafts.{name}"), len(tokens), f"drafts.{name}")
        for name, dtype in (("parents", "i4"), ("odds", "f4"), ("source", "u1"))
    )
    offsets = _read_offsets(message.offsets, sequences, len(tokens), "drafts")
    return DraftBatch(tokens, parents, accept_prob, source, offsets)


def _read_offsets(data: bytes, sequences: int, elements: int, owner: str) -> np.ndarray:
    field = f"{owner}.offsets"
    offsets = _of_length(unpack(data, "u4", field), sequences + 1, field)
    if offsets[0] != 0 or offsets[-1] != elements or np.count_nonzero(offsets[1:] < offsets[:-1]):
        raise WireError(f"{field} must rise from 0 to the {elements} elements of {owner}.tokens")
    return offsets


def _of_length(array: np.ndarray, length: int, field: str) -> np.ndarray:
    if len(array) != length:
        raise WireError(f"{field} has {len(array)} elements, not {length}")
    return array
