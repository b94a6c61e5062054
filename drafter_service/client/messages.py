"""Messages about sequences, and the service's welcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from drafter_service.client.about import About
from drafter_service.client.ended import Ended
from drafter_service.client.running import News, Running
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.wire import MAX_MESSAGE_BYTES, WireError, pack, unpack

PROTOCOL = 2

LOT_BYTES = 1 << 20
"""Text told again in one message: the service indexes as much in 50 ms, and the rest of the batch waits for it."""

MOST_TEXT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A sequence with more text fits into no message, and has no drafts once the service has lost it."""


class RefusedError(Exception):
    """The service does not serve this client; the text is its reason."""


def introductions(running: Running, rows: np.ndarray, wire_ids: Iterator[int]) -> list[pb.Start]:
    """Sequences that the service does not know, as they stand: as many as go into one message."""
    starts: list[pb.Start] = []
    room = LOT_BYTES
    for row in rows.tolist():
        nbytes = 4 * running.size(row)
        if nbytes > MOST_TEXT_BYTES:
            continue
        if nbytes > room and starts:
            break
        room -= nbytes
        wire_id = next(wire_ids)
        starts.append(_start(wire_id, running.about(row), running.introduce(row, wire_id)))
    return starts


def batch_message(news: News, max_draft: np.ndarray, cost: float | None, ahead: int) -> pb.Batch:
    """What is to be told of a batch, for which drafts are wanted; max_draft: uint32 [B]."""
    return pb.Batch(
        sequence_ids=pack(news.wire_ids, "u8"),
        tokens=pack(news.tokens, "u4"),
        offsets=pack(news.offsets, "u4"),
        verified=pack(news.verified, "u4"),
        accepted=pack(news.accepted, "u4"),
        max_draft=pack(max_draft, "u4"),
        cost=cost,
        ahead=ahead,
        steps=pack(news.steps, "u4") if news.steps is not None and np.count_nonzero(news.steps > 1) else b"",
    )


def endings(lot: Iterable[Ended], wire_ids: Iterator[int]) -> pb.DraftRequest:
    """Sequences that have ended; those that the service does not know begin with it."""
    request = pb.DraftRequest()
    for ended in lot:
        if not ended.is_known:
            ended.wire_id = next(wire_ids)
            request.starts.append(_start(ended.wire_id, ended.about, ended.committed))
            ended.is_known, ended.told = True, len(ended.committed)
        finish = request.finishes.add()
        finish.sequence_id = ended.wire_id
        finish.tokens = pack(ended.committed[ended.told :], "u4")
        finish.learn = ended.learn
        finish.verified, finish.accepted, finish.steps = ended.verified, ended.accepted, ended.steps
    return request


def read_welcome(response: pb.DraftResponse) -> dict[int, int]:
    """Which sequences go on: tokens, prompt included, that the service has of each, by wire id.

    Raises RefusedError for a service that speaks another protocol, and WireError for arrays that do not fit together.
    """
    if response.welcome.protocol != PROTOCOL:
        raise RefusedError(f"it does not speak protocol {PROTOCOL}; upgrade it to the version of this client")
    ids = unpack(response.welcome.resumed_ids, "u8", "welcome.resumed_ids")
    lengths = unpack(response.welcome.resumed_lengths, "u4", "welcome.resumed_lengths")
    if len(ids) != len(lengths):
        raise WireError(f"welcome.resumed_lengths has {len(lengths)} elements, not {len(ids)}")
    return dict(zip(ids.tolist(), lengths.tolist(), strict=True))


def _start(wire_id: int, about: About, committed: np.ndarray) -> pb.Start:
    return pb.Start(
        sequence_id=wire_id,
        prompt=pack(about.prompt, "u4"),
        committed=pack(committed, "u4"),
        session=about.session,
        request=about.request,
        is_private=not about.learn,
    )
