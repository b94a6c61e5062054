"""Read and validate requests, other than batches; errors name the field."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import pairwise, repeat
from typing import Any, Literal, NamedTuple

import numpy as np

from drafter_service.observability.facts import Engine, ModelIdentity
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    MAX_NAME_BYTES,
    MAX_STEPS,
    MAX_TEXTS,
    WireError,
    check_engine_name,
    read_offsets,
    unpack,
    unpack_tokens,
)
from ssd.budget.padding import MAX_LENGTHS, MAX_SIZES, Padding
from ssd.corpus.rollout import NO_TAG, Rollout
from ssd.stats import Stats

MIN_FIELD_BYTES = 2
MAX_CLIENT_NAME = 80
"""Maximum length of the name of a client in reports, in characters; longer ones are cut."""
MAX_COUNTED = 1 << 40
"""Largest count of draft tokens in a request."""
TOO_MANY_TEXTS = f"texts holds more than {MAX_TEXTS:,} texts; send them in several messages"
# Wire types of Protocol Buffers.
VARINT, LENGTH_PREFIXED = 0, 2
FIXED_BYTES = {1: 8, 5: 4}
"""Number of bytes of the values of the other wire types."""


class StartedSequence(NamedTuple):
    """A validated start."""

    message: pb.Start
    texts: dict[str, np.ndarray]
    """`prompt`, `hints` and `committed`, uint32 [n] each."""
    rollout: Rollout | None
    """None if it is no rollout."""

    @property
    def is_alone(self) -> bool:
        """Whether it belongs to no session, and its drafts are not withheld."""
        return not (self.message.session_id or self.message.shadow)

    @property
    def size(self) -> int:
        """Number of tokens that the sequence begins with."""
        return sum(map(len, self.texts.values()))


class Text(NamedTuple):
    """A validated text."""

    tokens: np.ndarray
    """uint32 [n]."""
    request_id: str | None
    prompt_length: int
    """Number of its first tokens that are its prompt."""
    time: float | None
    """When it was first learned, in seconds since 1970, never in the future; None: now."""
    tag: int
    """See `ssd.corpus.rollout.Rollout.tag`."""


def has_few_fields(data: bytes, limit: int, within: int = 0) -> bool:
    """Return whether a message has at most `limit` top-level fields, without parsing it.

    within: number of a field that is a message, whose top-level fields count, too; 0: none. Parsing takes much more
    memory than the message has bytes. The result for a damaged message may be wrong.
    """
    if len(data) <= MIN_FIELD_BYTES * limit:
        return True
    at = fields = inner_end = 0
    while at < len(data) and fields <= limit:
        key, at = _varint(data, at)
        kind = key & 7
        at += FIXED_BYTES.get(kind, 0)
        if kind in (VARINT, LENGTH_PREFIXED):
            value, at = _varint(data, at)
            if kind == LENGTH_PREFIXED and key >> 3 == within and at >= inner_end:
                inner_end = at + value
            elif kind == LENGTH_PREFIXED:
                at += value
        fields += 1
    return fields <= limit


def read_start(message: pb.Start, index: int, vocab_size: int = 0) -> StartedSequence:
    """Return the start at an index of a request; vocab_size: 0 if it is not known. Raises WireError."""
    field = f"starts[{index}]"
    texts = {
        name: unpack_tokens(getattr(message, name), f"{field}.{name}", vocab_size)
        for name in ("prompt", "hints", "committed")
    }
    for name in ("session_id", "request_id"):
        _read_name(getattr(message, name), f"{field}.{name}")
    try:
        rollout = Rollout(message.rollout.group, message.rollout.version) if message.HasField("rollout") else None
    except ValueError as problem:
        raise WireError(f"{field}.rollout: {problem}") from None
    return StartedSequence(message, texts, rollout)


def read_finish(message: pb.Finish, index: int, vocab_size: int = 0) -> np.ndarray:
    """Return the tokens of the finish at an index of a request, uint32 [n]; vocab_size: 0 if it is not known.

    Raises WireError.
    """
    field = f"finishes[{index}]"
    if message.steps > MAX_STEPS:
        raise WireError(f"{field}.steps is {message.steps}; the maximum is {MAX_STEPS}")
    return unpack_tokens(message.tokens, f"{field}.tokens", vocab_size)


def read_draft_counts(message: pb.DraftCounts) -> Stats:
    """Return counts of draft tokens. Raises WireError for counts of another number, or below 0."""
    stats = Stats()
    counted = message.unlearned_steps, message.unlearned_tokens, message.hits
    stats.counters.steps[:] = np.minimum(np.array(counted, np.uint64), MAX_COUNTED)
    for name, own in stats.counters._asdict().items():
        if name == "steps":
            continue
        counts = unpack(getattr(message, name), "f8" if own.dtype == np.float64 else "u8", f"draft_counts.{name}")
        if counts.size != own.size or not (counts <= MAX_COUNTED).all() or not (counts >= 0).all():
            raise WireError(f"draft_counts.{name} must be {own.size} counts of at most {MAX_COUNTED}")
        own[:] = counts.reshape(own.shape)
    return stats


def read_model(message: pb.Model) -> ModelIdentity:
    """Return a model's identity. Raises WireError for names that are too long."""
    return ModelIdentity(
        _read_name(message.name, "model.name") or "",
        _read_name(message.tokenizer, "model.tokenizer") or "",
        _read_name(message.adapter, "model.adapter") or "",
        message.vocab_size,
        _read_name(message.vocabulary, "model.vocabulary") or "",
        _read_name(message.configuration, "model.configuration") or "",
    )


def read_engine(message: pb.Hello) -> Engine:
    """Return the identity of an engine. Raises WireError for an invalid name."""
    check_engine_name(message.engine, "hello.engine")
    return Engine(message.client[:MAX_CLIENT_NAME], message.engine)


def read_padding(message: pb.Hello) -> Padding:
    """Return the shapes that an engine pads steps to. Raises WireError for too many, or if they are not ascending."""
    return Padding(
        _read_shapes(message.step_sizes, "hello.step_sizes", MAX_SIZES),
        _read_shapes(message.draft_lengths, "hello.draft_lengths", MAX_LENGTHS),
    )


def _read_shapes(data: bytes, field: str, most: int) -> tuple[int, ...]:
    shapes = unpack(data, "u4", field).tolist()
    if len(shapes) > most:
        raise WireError(f"{field} has {len(shapes)} elements; the maximum is {most}")
    if shapes != sorted(set(shapes)):
        raise WireError(f"{field} must be ascending")
    return tuple(shapes)


def read_texts(message: pb.Texts, vocab_size: int) -> Iterator[Text]:
    """Return texts. Raises WireError for inconsistent arrays, and for token ids outside the vocabulary."""
    tokens = unpack_tokens(message.tokens, "texts.tokens", vocab_size)
    data = message.offsets or bytes(4)
    texts = max(0, len(data) // 4 - 1)
    if texts > MAX_TEXTS:
        raise WireError(TOO_MANY_TEXTS)
    offsets = read_offsets(data, texts, len(tokens), "texts.offsets")
    if message.request_ids and len(message.request_ids) != texts:
        raise WireError(f"texts.request_ids has {len(message.request_ids)} elements, not {texts}")
    names = [_read_name(name, f"texts.request_ids[{index}]") for index, name in enumerate(message.request_ids)]
    lengths = _read_column(message.prompt_lengths, "u4", "prompt_lengths", texts) or [0] * texts
    for index, (length, size) in enumerate(zip(lengths, np.diff(offsets).tolist(), strict=True)):
        if length > size:
            raise WireError(f"texts.prompt_lengths[{index}] is {length}; the text has {size} tokens")
    now = time.time()
    times = _read_column(message.times, "f8", "times", texts) or [now] * texts
    tags = _read_column(message.tags, "u4", "tags", texts) or [NO_TAG] * texts
    if max(tags, default=0) >> 16:
        raise WireError(f"texts.tags holds {max(tags)}; a tag has 16 bits")
    runs = (tokens[first:end] for first, end in pairwise(offsets.tolist()))
    # The comparison is false for NaN, which becomes None.
    past = [at if at < now else None for at in times]
    return map(Text, runs, names or repeat(None), lengths, past, tags)


def _read_column(data: bytes, dtype: Literal["f8", "u4"], name: str, texts: int) -> list[Any] | None:
    """Return the elements of all texts, None if they are not given. Raises WireError for another number."""
    if not data:
        return None
    column = unpack(data, dtype, f"texts.{name}")
    if len(column) != texts:
        raise WireError(f"texts.{name} has {len(column)} elements, not {texts}")
    return list(column.tolist())


def _read_name(text: str, field: str) -> str | None:
    """Return a name, None if it is empty. Raises WireError if it is too long."""
    if len(text) > MAX_NAME_BYTES:
        raise WireError(f"{field} has {len(text)} characters; the maximum is {MAX_NAME_BYTES}")
    return text or None


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the variable-length integer at an index, and the index after it."""
    value = shift = 0
    for byte in data[at : at + 10]:
        value |= (byte & 127) << shift
        shift += 7
        at += 1
        if byte < 128:
            break
    return value, at
