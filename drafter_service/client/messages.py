"""Messages about sequences, and the service's welcome."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from drafter_service.client.ended import Ended
from drafter_service.client.outgoing import Beginning, Ending, Outgoing
from drafter_service.client.running import News
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES, WireError, pack, unpack

PROTOCOL = 2

MOST_TEXT_BYTES = MAX_MESSAGE_BYTES - (1 << 20)
"""A sequence with more text fits into no message, and has no drafts once the service has lost it."""


class RefusedError(Exception):
    """The service does not serve this client; the text is its reason."""


def batch_message(news: News, max_draft: np.ndarray, cost: float | None) -> pb.Batch:
    """What is to be told of a batch, for which drafts are wanted; max_draft: uint32 [B]."""
    return pb.Batch(
        sequence_ids=pack(news.wire_ids, "u8"),
        tokens=pack(news.tokens, "u4"),
        offsets=pack(news.offsets, "u4"),
        verified=pack(news.verified, "u4"),
        max_draft=pack(max_draft, "u4"),
        cost=cost,
        steps=pack(news.steps, "u4") if news.steps is not None and np.count_nonzero(news.steps > 1) else b"",
    )


def endings(lot: Iterable[Ended], wire_ids: Iterator[int]) -> Outgoing:
    """Sequences that have ended; those that the service does not know begin with it."""
    message = Outgoing()
    for ended in lot:
        if not ended.is_known:
            ended.wire_id = next(wire_ids)
            message.starts.append(Beginning(ended.wire_id, ended.about, ended.committed))
            ended.is_known, ended.told = True, len(ended.committed)
        message.finishes.append(
            Ending(
                ended.wire_id,
                ended.committed[ended.told :],
                ended.learn,
                ended.verified,
                ended.steps,
            )
        )
    return message


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
