"""One engine's stream: checks a whole request, then applies it, or refuses it without any effect."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import WireError, drafts_message, read_batch, unpack_tokens
from ssd.draft import DraftBatch, Progress
from ssd.drafter import SuffixDrafter


@dataclass(frozen=True)
class Start:
    """A checked start."""

    sequence_id: int
    prompt: np.ndarray
    """uint32 [P]."""


@dataclass(frozen=True)
class Finish:
    """A checked finish."""

    sequence_id: int
    tokens: np.ndarray
    """uint32 [n]."""
    learn: bool


class Session:
    """The sequences of one stream over a corpus that streams share."""

    def __init__(self, drafter: SuffixDrafter) -> None:
        """`drafter` is the stream's own; it may share its corpus."""
        self._drafter = drafter
        self._running: set[int] = set()

    def answer(self, data: bytes) -> pb.DraftReply:
        """The reply to one serialised DraftRequest; an error, and no effect, for one that is malformed."""
        request = pb.DraftRequest()
        try:
            request.ParseFromString(data)
        except DecodeError:
            return _refusal(0, "the message is not a DraftRequest of ssd.drafter.v1")
        try:
            return pb.DraftReply(step=request.step, drafts=drafts_message(self._apply(request)))
        except WireError as problem:
            return _refusal(request.step, str(problem))

    def close(self) -> None:
        """Drop what is still running; nothing of it is learned."""
        self._drafter.close()

    def _apply(self, request: pb.DraftRequest) -> DraftBatch:
        running = set(self._running)
        starts = [_read_start(message, index, running) for index, message in enumerate(request.starts)]
        finishes = [_read_finish(message, index, running) for index, message in enumerate(request.finishes)]
        progress = _read_progress(request.batch, running) if request.HasField("batch") else None
        # Nothing below can fail.
        self._running = running
        for start in starts:
            self._drafter.start(start.sequence_id, start.prompt)
        for finish in finishes:
            self._drafter.finish(finish.sequence_id, finish.tokens, learn=finish.learn)
        return self._drafter.draft(progress) if progress is not None else DraftBatch.empty(0)


def _read_start(message: pb.Start, index: int, running: set[int]) -> Start:
    if message.sequence_id in running:
        raise WireError(f"starts[{index}].sequence_id {message.sequence_id} is running already")
    running.add(message.sequence_id)
    return Start(message.sequence_id, unpack_tokens(message.prompt, f"starts[{index}].prompt"))


def _read_finish(message: pb.Finish, index: int, running: set[int]) -> Finish:
    if message.sequence_id not in running:
        raise WireError(f"finishes[{index}].sequence_id {message.sequence_id} was not started on this stream")
    running.remove(message.sequence_id)
    return Finish(message.sequence_id, unpack_tokens(message.tokens, f"finishes[{index}].tokens"), message.learn)


def _read_progress(message: pb.Batch, running: set[int]) -> Progress:
    progress = read_batch(message)
    for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
        if sequence_id not in running:
            raise WireError(f"batch.sequence_ids[{index}] {sequence_id} was not started on this stream")
    return progress


def _refusal(step: int, message: str) -> pb.DraftReply:
    code, _ = grpc.StatusCode.INVALID_ARGUMENT.value
    return pb.DraftReply(step=step, error=pb.Error(code=code, message=message))
