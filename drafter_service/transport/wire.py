"""The wire format: messages to and from arrays, with validation of received ones, and frames of the step socket.

Only this module encodes arrays.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping, Sequence

import grpc
import numpy as np

from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DraftShape
from ssd.corpus.ring import MAX_TOKEN_ID, any_of, check_tokens, has_invalid_token
from ssd.corpus.rollout import Rollout
from ssd.types import ROOT, DraftBatch, Progress, StepTime, check_seed

PROTOCOL = 3
"""Version of the protocol, sent in the handshake."""

MAX_MESSAGE_BYTES = 64 << 20
"""Maximum size of a message in bytes: enough for starts with prompts of millions of tokens."""

MESSAGE_SIZES = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
)
"""The maximum message size as options of gRPC servers and channels."""

MAX_FIELDS = 1 << 16
"""Maximum number of fields of a request, where each start and finish is a field, and of sequences of a batch."""

MAX_TEXTS = 1 << 16
"""Maximum number of finished texts in a message."""

MAX_NAME_BYTES = 512
"""Maximum length of the name of a session, a request, or a part of a model's identity, in bytes of UTF-8."""

MAX_ENGINE_NAME = 128
"""Maximum length of the name of an engine, in characters."""
ENGINE_NAME = re.compile(rf"[A-Za-z0-9_.:@/-]{{0,{MAX_ENGINE_NAME}}}")
"""Pattern of the names of engines, which are labels of metrics. "" is the name of unknown ones."""

MAX_STEPS = 1 << 20
"""Maximum number of engine steps that a message may report for a sequence."""

MAX_STEP_TIMES = 64
"""Maximum number of durations of steps in a message."""

STEP_FIELDS = (
    ("step_tokens", "I", 4),
    ("step_sequences", "I", 4),
    ("step_seconds", "d", 8),
    ("drafting_seconds", "d", 8),
)
"""Fields of a batch with the columns of `StepTime`, their types as in `struct`, and the bytes of an element."""

MAX_COUNT = 0xFFFF_FFFF

SHAPE_CODES: dict[DraftShape | None, pb.DraftShape] = {
    None: pb.DRAFT_SHAPE_UNSPECIFIED,
    "path": pb.DRAFT_SHAPE_PATH,
    "tree": pb.DRAFT_SHAPE_TREE,
}
"""Codes of the shapes of drafts; None: as the service is configured."""
SHAPES = {code: shape for shape, code in SHAPE_CODES.items()}

STATUS = {code.value[0]: code for code in grpc.StatusCode}
"""gRPC status codes by number."""

DRAFT_METHOD = f"/{pb.DESCRIPTOR.services_by_name['DrafterService'].full_name}/Draft"

DTYPES = {name: np.dtype(f"<{name}") for name in ("u1", "u4", "u8", "i4", "f4", "f8")}
"""Data types on the wire and in the shared log, by their numpy names."""


ONE_AS_BITS = np.float32(1.0).view(np.uint32)
"""Bits of 1.0: as unsigned integers, floats from 0 to 1 are at most this; negative, greater and NaN are above."""


MAX_PATH = 127
PATH_PARENTS = [np.arange(ROOT, size + ROOT, dtype=np.int32).astype("<i4").tobytes() for size in range(MAX_PATH + 1)]
"""Parents of paths, i32, by their number of tokens, which most drafts have."""


class WireError(ValueError):
    """A message is malformed; the text names the field and the problem."""


def check_engine_name(name: str, field: str = "engine") -> None:
    """Raise WireError unless an engine may have this name; `field` is for its text."""
    if not ENGINE_NAME.fullmatch(name):
        raise WireError(
            f"{field} {name[:200]!r} is not a name of an engine; use at most {MAX_ENGINE_NAME} letters, digits, '_', "
            "'.', ':', '@', '/' and '-'"
        )


def pack(array: np.ndarray, dtype: str) -> bytes:
    """Return an array as packed little-endian bytes; `dtype` as in numpy, such as "u4"."""
    wanted = DTYPES[dtype]
    return (array if array.dtype is wanted else array.astype(wanted, copy=False)).tobytes()


def unpack(data: bytes | bytearray, dtype: str, field: str) -> np.ndarray:
    """Return packed bytes as a read-only array. Raises WireError if they are not a whole number of elements."""
    wire = DTYPES[dtype]
    try:
        array = np.frombuffer(data, wire)
    except ValueError:
        raise WireError(f"{field} has {len(data)} bytes, not a multiple of {wire.itemsize}") from None
    return array if wire.isnative else array.astype(dtype)


def unpack_tokens(data: bytes, field: str, vocab_size: int = 0) -> np.ndarray:
    """Return token ids, uint32. Raises WireError for the reserved id, and for ids outside the vocabulary.

    vocab_size: 0 if it is not known.
    """
    tokens = unpack(data, "u4", field)
    if has_invalid_token(tokens, vocab_size):
        largest = int(tokens.max())
        if largest > MAX_TOKEN_ID:
            raise WireError(f"{field} holds the token id {largest}; the maximum is {MAX_TOKEN_ID}")
        raise WireError(f"{field} holds the id {largest}; the vocabulary has {vocab_size} tokens")
    return tokens


def start_message(
    prompt: np.ndarray,
    *,
    hints: np.ndarray | None = None,
    session_id: str | None = None,
    request_id: str | None = None,
    learn: bool = True,
    rollout: Rollout | None = None,
    seed: int | None = None,
    shadow: bool = False,
    vocab_size: int = 0,
) -> pb.Start:
    """Return the start of a sequence, without an id; prompt: uint32 [P], hints: uint32 [H].

    vocab_size: 0 if it is not known. Raises ValueError for a token id that is reserved or outside the vocabulary, for a
    name that is too long, and as `check_seed`.
    """
    check_seed(seed)
    for tokens in (prompt, *([] if hints is None else [hints])):
        check_tokens(tokens, vocab_size)
    for what, name in (("session_id", session_id), ("request_id", request_id)):
        if name is not None and len(name.encode()) > MAX_NAME_BYTES:
            raise ValueError(f"{what} has {len(name.encode())} bytes; the maximum is {MAX_NAME_BYTES}")
    return pb.Start(
        prompt=pack(prompt, "u4"),
        hints=b"" if hints is None else pack(hints, "u4"),
        session_id=session_id or "",
        request_id=request_id or "",
        learn=learn,
        shadow=shadow,
        rollout=None if rollout is None else pb.Rollout(group=rollout.group, version=rollout.version),
        seed=seed,
    )


def batch_message(progress: Progress, sequence_ids: bytes | None = None, message: pb.Batch | None = None) -> pb.Batch:
    """Write a step's progress into a message, by default a new one, and return it.

    sequence_ids: other ids, u64 [B]. message: an empty one, such as a field of a request, which would copy another.
    """
    message = pb.Batch() if message is None else message
    message.sequence_ids = pack(progress.sequence_ids, "u8") if sequence_ids is None else sequence_ids
    message.tokens = pack(progress.tokens, "u4")
    message.offsets = pack(progress.offsets, "u4")
    message.verified = pack(progress.verified, "u4")
    message.max_draft = pack(progress.max_draft, "u4")
    if progress.cost is not None:
        message.cost = progress.cost
    if progress.steps is not None and any_of(progress.steps > 1):
        message.steps = pack(progress.steps, "u4")
    if progress.min_path_prob is not None:
        message.min_path_prob = progress.min_path_prob
    if progress.step_times:
        _write_step_times(progress.step_times[-MAX_STEP_TIMES:], message)
    message.other_tokens, message.other_sequences = progress.other_tokens, progress.other_sequences
    return message


def read_batch(message: pb.Batch, vocab_size: int = 0) -> Progress:
    """Return a step's progress; `check_batch`, or a drafter, checks whether its arrays fit together.

    Raises WireError for bytes that are not a whole number of elements, too many sequences or steps, and for token ids
    as `unpack_tokens`.
    """
    sequences = len(message.sequence_ids) // 8
    if sequences > MAX_FIELDS:
        raise WireError(f"batch.sequence_ids has {sequences} elements; the maximum is {MAX_FIELDS}")
    return Progress(
        sequence_ids=unpack(message.sequence_ids, "u8", "batch.sequence_ids"),
        tokens=unpack_tokens(message.tokens, "batch.tokens", vocab_size),
        offsets=unpack(message.offsets, "u4", "batch.offsets"),
        verified=unpack(message.verified, "u4", "batch.verified"),
        max_draft=unpack(message.max_draft, "u4", "batch.max_draft"),
        cost=message.cost if message.HasField("cost") else None,
        steps=_read_steps(message.steps) if message.steps else None,
        min_path_prob=message.min_path_prob if message.HasField("min_path_prob") else None,
        step_times=_read_step_times(message),
        other_tokens=message.other_tokens,
        other_sequences=message.other_sequences,
    )


def check_batch(batch: Progress, offered: Mapping[int, int] | None = None) -> None:
    """Raise WireError as `Progress.check` raises ValueError; offered: None if counts are not checked."""
    try:
        batch.check(dict.fromkeys(batch.sequence_ids.tolist(), MAX_COUNT) if offered is None else offered)
    except ValueError as problem:
        raise WireError(f"batch: {problem}") from None


def drafts_message(drafts: DraftBatch, message: pb.Drafts | None = None) -> pb.Drafts:
    """Write drafts into a message, see `batch_message`, and return it."""
    message = pb.Drafts() if message is None else message
    message.tokens = pack(drafts.tokens, "u4")
    message.parents = pack(drafts.parents, "i4")
    message.accept_prob = pack(drafts.accept_prob, "f4")
    message.source = pack(drafts.source, "u1")
    message.offsets = pack(drafts.offsets, "u4")
    message.pause_steps = drafts.pause_steps
    return message


def read_drafts(message: pb.Drafts, limits: np.ndarray, vocab_size: int = 0) -> tuple[DraftBatch, int]:
    """Return the drafts with at most `limits` tokens each, uint32 [B], and the number of malformed ones.

    A malformed draft, which becomes empty, is too long, has a token id outside the vocabulary, or a parent or a
    probability that is impossible. vocab_size: 0 if it is not known. Raises WireError for inconsistent arrays.
    """
    tokens = unpack(message.tokens, "u4", "drafts.tokens")
    count = len(tokens)
    parents = _read_array(message.parents, "i4", count, "drafts.parents")
    accept_prob = _read_array(message.accept_prob, "f4", count, "drafts.accept_prob")
    source = _read_array(message.source, "u1", count, "drafts.source")
    offsets = read_offsets(message.offsets, len(limits), count, "drafts.offsets")
    drafts = DraftBatch(tokens, parents, accept_prob, source, offsets, message.pause_steps)
    sizes = offsets[1:] - offsets[:-1]
    is_long = sizes > limits
    # As unsigned numbers, parents below the root and probabilities below 0 are too large.
    is_wrong = accept_prob.view(np.uint32) > ONE_AS_BITS
    is_wrong |= tokens > (vocab_size - 1 if vocab_size else MAX_TOKEN_ID)
    if b"".join([PATH_PARENTS[size & MAX_PATH] for size in sizes.tolist()]) != message.parents:
        index = np.arange(count, dtype=np.uint32) - offsets[:-1].repeat(sizes)
        is_wrong |= (parents - ROOT).view(np.uint32) > index
    if not any_of(is_wrong) and not any_of(is_long):
        return drafts, 0
    wrong_before = np.concatenate(([0], is_wrong.cumsum()))
    is_kept = (wrong_before[offsets[1:]] == wrong_before[offsets[:-1]]) & ~is_long
    kept = is_kept.nonzero()[0]
    return drafts.take(kept).scatter(kept, len(limits)), len(limits) - len(kept)


def read_offsets(data: bytes, items: int, elements: int, field: str) -> np.ndarray:
    """Return offsets, uint32 [items + 1]. Raises WireError unless they increase from 0 to `elements`."""
    offsets = _read_array(data, "u4", items + 1, field)
    bounds = offsets.tolist()
    if bounds[0] != 0 or bounds[-1] != elements or sorted(bounds) != bounds:
        raise WireError(f"{field} must increase from 0 to {elements}, the number of elements")
    return offsets


def _write_step_times(steps: Sequence[StepTime], message: pb.Batch) -> None:
    count = len(steps)
    tokens, sequences, seconds, drafting_s = zip(*steps, strict=True)
    # Numbers that do not fit become others that the service ignores.
    message.step_tokens = struct.pack(f"<{count}I", *(max(0, min(number, MAX_COUNT)) for number in tokens))
    message.step_sequences = struct.pack(f"<{count}I", *(max(0, min(number, MAX_COUNT)) for number in sequences))
    message.step_seconds = struct.pack(f"<{count}d", *seconds)
    message.drafting_seconds = struct.pack(f"<{count}d", *drafting_s)


def _read_step_times(message: pb.Batch) -> Sequence[StepTime]:
    """Return the durations of steps. Raises WireError for inconsistent arrays, and for too many steps."""
    if not message.step_tokens:
        return ()
    count = len(message.step_tokens) // 4
    if count > MAX_STEP_TIMES:
        raise WireError(f"batch.step_tokens has {count} elements; the maximum is {MAX_STEP_TIMES}")
    columns = []
    for field, kind, size in STEP_FIELDS:
        # Without durations, steps are ignored and counted.
        data = getattr(message, field) or (bytes(size * count) if kind == "d" else b"")
        if len(data) != size * count:
            raise WireError(f"batch.{field} has {len(data)} bytes, not {size * count}: as many elements as step_tokens")
        columns.append(struct.unpack(f"<{count}{kind}", data))
    return [StepTime(*row) for row in zip(*columns, strict=True)]


def _read_steps(data: bytes) -> np.ndarray:
    steps = unpack(data, "u4", "batch.steps")
    if len(steps) and int(steps.max()) > MAX_STEPS:
        raise WireError(f"batch.steps holds {int(steps.max())}; the maximum is {MAX_STEPS}")
    return steps


def _read_array(data: bytes, dtype: str, length: int, field: str) -> np.ndarray:
    array = unpack(data, dtype, field)
    if len(array) != length:
        raise WireError(f"{field} has {len(array)} elements, not {length}")
    return array


# Frames: the Draft stream over a plain Unix socket, several times faster than HTTP/2.
#
#    client    MAGIC, then frames: the "authorization" metadata of the call ("" for none), then every DraftRequest
#    service   frames: every DraftResponse, then one that is marked as the last and holds an Error; its code is a gRPC
#              status code, 0 for a stream that ended normally
#
# A frame is a length in bytes, uint32 little endian, and the data. The highest bit of the length marks the last frame.

MAGIC = b"ssd.drafter.v1\n"
HEADER = struct.Struct("<I")
LAST = 1 << 31


def framed(data: bytes) -> bytes:
    """Return a message as a frame."""
    return HEADER.pack(len(data)) + data


def last_frame(code: int, message: str) -> bytes:
    """Return the frame that ends a stream; `code` is a gRPC status code."""
    data = pb.Error(code=code, message=message).SerializeToString()
    return HEADER.pack(len(data) | LAST) + data


def read_header(header: bytes | bytearray, begin: int = 0, limit: int = MAX_MESSAGE_BYTES) -> tuple[int, bool]:
    """Return a frame's number of bytes, and whether it is the last. Raises WireError for a frame that is too long."""
    (length,) = HEADER.unpack_from(header, begin)
    size = length & ~LAST
    if size > limit:
        raise WireError(f"a frame has {size} bytes; the maximum is {limit}")
    return size, length >= LAST


class Frames:
    """Splits received bytes into frames."""

    def __init__(self, first_limit: int = MAX_MESSAGE_BYTES) -> None:
        """first_limit: maximum number of bytes of the first frame."""
        self._limit = first_limit
        self._data = bytearray()

    def feed(self, data: bytes) -> list[tuple[bytes, bool]]:
        """Add received bytes; return completed frames, each with whether it is the last. Raises as `read_header`."""
        if not self._data and len(data) >= HEADER.size:
            size, is_last = read_header(data, 0, self._limit)
            if size == len(data) - HEADER.size:
                self._limit = MAX_MESSAGE_BYTES
                return [(data[HEADER.size :], is_last)]
        self._data += data
        frames, begin = [], 0
        while len(self._data) >= begin + HEADER.size:
            size, is_last = read_header(self._data, begin, self._limit)
            end = begin + HEADER.size + size
            if len(self._data) < end:
                break
            frames.append((bytes(self._data[begin + HEADER.size : end]), is_last))
            begin, self._limit = end, MAX_MESSAGE_BYTES
        del self._data[:begin]
        return frames
