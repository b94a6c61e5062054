"""One engine's stream: checks a whole request, then applies it, or refuses it without any effect."""

from __future__ import annotations

from dataclasses import dataclass

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import WireError, drafts_message, read_batch, unpack_tokens
from ssd.article import ArticleDrafter
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
    verified: int
    accepted: int
    learn: bool


class Session:
    """The sequences of one stream over a corpus that streams share."""

    def __init__(self, drafter: SuffixDrafter | ArticleDrafter) -> None:
        """`drafter` is the stream's own; it may share its corpus."""
        self._drafter = drafter

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
        # What would run, and with how long a draft each, if all of the request were applied.
        offered = self._drafter.offered()
        starts = [_read_start(message, index, offered) for index, message in enumerate(request.starts)]
        finishes = [_read_finish(message, index, offered) for index, message in enumerate(request.finishes)]
        progress = _read_progress(request.batch, offered) if request.HasField("batch") else None
        # Nothing below can fail.
        for start in starts:
            self._drafter.start(start.sequence_id, start.prompt)
        for finish in finishes:
            self._drafter.finish(
                finish.sequence_id,
                finish.tokens,
                verified=finish.verified,
                accepted=finish.accepted,
                learn=finish.learn,
            )
        return self._drafter.draft(progress) if progress is not None else DraftBatch.empty(0)


def _read_start(message: pb.Start, index: int, offered: dict[int, int]) -> Start:
    if message.sequence_id in offered:
        raise WireError(f"starts[{index}].sequence_id {message.sequence_id} is running already")
    offered[message.sequence_id] = 0
    return Start(message.sequence_id, unpack_tokens(message.prompt, f"starts[{index}].prompt"))


def _read_finish(message: pb.Finish, index: int, offered: dict[int, int]) -> Finish:
    field = f"finishes[{index}]"
    if message.sequence_id not in offered:
        raise WireError(f"{field}.sequence_id {message.sequence_id} was not started on this stream")
    _check_outcome(field, message.verified, message.accepted, offered.pop(message.sequence_id))
    tokens = unpack_tokens(message.tokens, f"{field}.tokens")
    return Finish(message.sequence_id, tokens, message.verified, message.accepted, message.learn)


def _read_progress(message: pb.Batch, offered: dict[int, int]) -> Progress:
    progress = read_batch(message)
    outcomes = zip(progress.sequence_ids.tolist(), progress.verified.tolist(), progress.accepted.tolist(), strict=True)
    for index, (sequence_id, verified, accepted) in enumerate(outcomes):
        if sequence_id not in offered:
            raise WireError(f"batch.sequence_ids[{index}] {sequence_id} was not started on this stream")
        _check_outcome("batch", verified, accepted, offered[sequence_id], f"[{index}]")
    return progress


def _check_outcome(owner: str, verified: int, accepted: int, offered: int, element: str = "") -> None:
    if verified > offered:
        raise WireError(f"{owner}.verified{element} is {verified}; the sequence's last draft had {offered} tokens")
    if accepted > verified:
        raise WireError(f"{owner}.accepted{element} is {accepted}, of {verified} verified")


def _refusal(step: int, message: str) -> pb.DraftReply:
    code, _ = grpc.StatusCode.INVALID_ARGUMENT.value
    return pb.DraftReply(step=step, error=pb.Error(code=code, message=message))
