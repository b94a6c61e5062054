"""What a server reads from messages beyond arrays: every field checked, errors that name it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from drafter_service.observability.facts import ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, pack, unpack, unpack_tokens

MOST_NAME_BYTES = 512
"""Of names of sessions and requests, and of what a model is called."""
MOST_STEPS = 1 << 20
MOST_FIELDS = 1 << 16
"""Of a request, each sequence that begins or ends being one; and sequences of a batch."""
_NUMBER, _TEXT = 0, 2
LEAST_FIELD_BYTES = 2
_FIXED = {1: 8, 5: 4}
"""Wire types of Protocol Buffers: numbers, fields with a length, and those of so many bytes."""


@dataclass(frozen=True, eq=False)
class Begin:
    """A checked start."""

    sequence_id: int
    prompt: np.ndarray
    """uint32 [P]."""
    committed: np.ndarray
    """uint32 [n]."""
    session: str | None
    request: str | None
    learn: bool


@dataclass(frozen=True, eq=False)
class End:
    """A checked finish."""

    sequence_id: int
    tokens: np.ndarray
    """uint32 [n]."""
    verified: int
    accepted: int
    steps: int
    learn: bool


@dataclass(frozen=True, eq=False)
class Texts:
    """Checked texts."""

    tokens: np.ndarray
    """uint32 [T]."""
    offsets: np.ndarray
    """uint32 [D + 1]."""
    names: list[str | None]

    def __len__(self) -> int:
        return len(self.names)

    def text(self, index: int) -> np.ndarray:
        """uint32 [n]."""
        return self.tokens[self.offsets[index] : self.offsets[index + 1]]


def has_few_fields(data: bytes, most: int) -> bool:
    """Whether a message has at most so many fields, those within fields not counted; a damaged one may seem to."""
    if len(data) <= LEAST_FIELD_BYTES * most:
        return True
    at = fields = 0
    while at < len(data) and fields <= most:
        kind = data[at] & 7
        _, at = _varint(data, at)
        at += _FIXED.get(kind, 0)
        if kind in (_NUMBER, _TEXT):
            value, at = _varint(data, at)
            at += value if kind == _TEXT else 0
        fields += 1
    return fields <= most


def read_begin(message: pb.Start, index: int) -> Begin:
    """Raises WireError."""
    field = f"starts[{index}]"
    return Begin(
        message.sequence_id,
        unpack_tokens(message.prompt, f"{field}.prompt"),
        unpack_tokens(message.committed, f"{field}.committed"),
        _name(message.session, f"{field}.session"),
        _name(message.request, f"{field}.request"),
        not message.is_private,
    )


def read_end(message: pb.Finish, index: int) -> End:
    """Raises WireError."""
    field = f"finishes[{index}]"
    if message.accepted > message.verified:
        raise WireError(f"{field}.accepted is {message.accepted}, of {message.verified} verified")
    if message.steps > MOST_STEPS:
        raise WireError(f"{field}.steps is {message.steps}; at most {MOST_STEPS} are possible")
    tokens = unpack_tokens(message.tokens, f"{field}.tokens")
    return End(message.sequence_id, tokens, message.verified, message.accepted, max(1, message.steps), message.learn)


def read_steps(message: pb.Batch, sequences: int) -> int:
    """How many steps of the engine a batch tells of beyond one a sequence. Raises WireError."""
    if not message.steps:
        return 0
    steps = unpack(message.steps, "u4", "batch.steps")
    if len(steps) != sequences:
        raise WireError(f"batch.steps has {len(steps)} elements, not {sequences}")
    if len(steps) and int(steps.max()) > MOST_STEPS:
        raise WireError(f"batch.steps holds {int(steps.max())}; at most {MOST_STEPS} are possible")
    return int(np.maximum(steps, 1).sum()) - sequences


def read_model(message: pb.Model) -> ModelIdentity:
    """Raises WireError for names that are too long."""
    return ModelIdentity(
        _name(message.name, "model.name") or "",
        _name(message.tokenizer, "model.tokenizer") or "",
        _name(message.adapter, "model.adapter") or "",
        message.vocabulary_size,
    )


def read_texts(message: pb.Texts, vocabulary_size: int) -> Texts:
    """Raises WireError for arrays that do not fit together, and for token ids that the vocabulary does not have."""
    tokens = unpack_tokens(message.tokens, "texts.tokens")
    offsets = unpack(message.offsets or bytes(4), "u4", "texts.offsets")
    if offsets[0] != 0 or offsets[-1] != len(tokens) or np.any(offsets[1:] < offsets[:-1]):
        raise WireError(f"texts.offsets must rise from 0 to the {len(tokens)} elements of texts.tokens")
    texts = len(offsets) - 1
    if message.requests and len(message.requests) != texts:
        raise WireError(f"texts.requests has {len(message.requests)} elements, not {texts}")
    if vocabulary_size and len(tokens) and int(tokens.max()) >= vocabulary_size:
        raise WireError(f"texts.tokens holds the id {int(tokens.max())}; the vocabulary has {vocabulary_size} tokens")
    names = [_name(name, f"texts.requests[{index}]") for index, name in enumerate(message.requests)]
    return Texts(tokens, offsets, names or [None] * texts)


def pack_resumed(sizes: dict[int, int]) -> tuple[bytes, bytes]:
    """Running sequences and how many tokens each has, as in Welcome."""
    return pack(np.array(list(sizes), np.uint64), "u8"), pack(np.array(list(sizes.values()), np.uint32), "u4")


def _name(text: str, field: str) -> str | None:
    """A name; None if it is empty."""
    if len(text) > MOST_NAME_BYTES:
        raise WireError(f"{field} has {len(text)} characters; at most {MOST_NAME_BYTES} are possible")
    return text or None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """A number of Protocol Buffers, and where it ends."""
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            break
    return value, at
