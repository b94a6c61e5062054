"""The outbox keeps the order, is bounded, and never drops events that forget."""

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.replication.events import Dropped, Finished, Forgotten, ForgottenBefore
from drafter_service.replication.shared_log import ENTRIES_AT_ONCE, ENTRY_EVENTS, ENTRY_TOKENS, EVENT_WEIGHT, Outbox
from tests.strategies import array

MAKERS = {
    "finished": lambda number: Finished(str(number), array([number]), 0.0),
    "forgotten": lambda number: Forgotten(str(number), 0.0),
    "before": lambda number: ForgottenBefore(float(number)),
    "dropped": lambda number: Dropped(float(number)),
}


def number_of(event):
    return int(event.request) if isinstance(event, Finished | Forgotten) else int(event.time)


def request(number, tokens=1):
    return Finished(str(number), np.full(tokens, number, np.uint32), 0.0)


def take_all(outbox):
    entries = []
    while taken := outbox.take():
        entries += taken
        outbox.settle()
    return entries


@given(st.lists(st.sampled_from(sorted(MAKERS)), max_size=600), st.integers(1, 30))
def test_outbox_keeps_the_order_and_drops_the_oldest_requests(kinds, room):
    outbox = Outbox(room * (1 + EVENT_WEIGHT))
    dropped = sum(outbox.put(MAKERS[kind](number)) for number, kind in enumerate(kinds))
    entries = take_all(outbox)
    requests = [number for number, kind in enumerate(kinds) if kind == "finished"]
    assert dropped == max(0, len(requests) - room)
    expected = [number for number in range(len(kinds)) if number not in requests[:dropped]]
    assert [number_of(event) for entry in entries for event in entry] == expected
    for entry in entries:
        assert 0 < len(entry) <= ENTRY_EVENTS
        assert not any(isinstance(event, ForgottenBefore | Dropped) for event in entry[1:])


def test_tokens_are_copied():
    outbox, tokens = Outbox(1000), array([1, 2])
    outbox.put(Finished("a", tokens, 0.0))
    tokens[:] = 9
    assert take_all(outbox)[0][0].tokens.tolist() == [1, 2]


def test_entries_end_when_they_have_enough_tokens():
    outbox = Outbox(1 << 30)
    for number in range(2 * ENTRIES_AT_ONCE + 2):
        outbox.put(request(number, ENTRY_TOKENS // 2))
    assert [len(entry) for entry in outbox.take()] == [2] * ENTRIES_AT_ONCE
    assert [len(entry) for entry in outbox.take()] == [2]


def test_request_larger_than_the_outbox_is_dropped_alone():
    outbox = Outbox(1000)
    outbox.put(request(1))
    assert outbox.put(request(2, 1000)) == 1000
    assert outbox.is_overflowing
    assert [[event.request for event in entry] for entry in take_all(outbox)] == [["1"]]
    assert not outbox.is_overflowing


def test_flush_waits_for_pending_but_not_for_later_events():
    async def scenario():
        outbox = Outbox(1000)
        await outbox.flush()
        outbox.put(request(1))
        flushing = asyncio.create_task(outbox.flush())
        await asyncio.sleep(0)
        outbox.take()
        outbox.put(request(2))
        await asyncio.sleep(0)
        assert not flushing.done()
        outbox.settle()
        await asyncio.wait_for(flushing, 5)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(outbox.flush(), 0)

    asyncio.run(scenario())
