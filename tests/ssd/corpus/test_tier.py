"""Two buffers of a tier: a suffix array's buffer is used again once there are no references to it."""

import sys
import threading
import weakref

import pytest

from ssd.corpus import tier as module
from ssd.corpus.tier import ReadersError, Tier, empty_suffix_array


@pytest.mark.parametrize("change", [Tier.next_buffer, Tier.release, lambda tier: tier.replace(empty_suffix_array())])
def test_changes_wait_until_the_previous_suffix_array_has_no_readers(change):
    tier, done = Tier(4), threading.Event()
    tier.next_buffer().array[:2] = (3, 1)
    tier.publish(2)
    read = tier.newest
    tier.publish(0)

    def change_it():
        change(tier)
        done.set()

    changing = threading.Thread(target=change_it, daemon=True)
    changing.start()
    assert not done.wait(0.05)
    assert read.positions.tolist() == [3, 1]
    del read
    changing.join(60)
    assert done.is_set()


def test_a_change_gives_up_if_a_reader_does_not_end(monkeypatch):
    monkeypatch.setattr(module, "READERS_LIMIT_S", 0.01)
    tier = Tier(4)
    tier.next_buffer().array[:2] = (3, 1)
    tier.publish(2)
    read = tier.newest
    tier.publish(0)
    for change in (tier.next_buffer, tier.release, lambda: tier.replace(empty_suffix_array())):
        with pytest.raises(ReadersError, match="still being read after"):
            change()
    assert read.positions.tolist() == [3, 1]
    del read
    tier.publish(1)


@pytest.mark.parametrize("readers", [1, 2])
def test_positions_that_are_kept_are_not_waited_for_and_not_overwritten(readers):
    tier = Tier(4)
    tier.next_buffer().array[:2] = (3, 1)
    tier.publish(2)
    kept = [tier.keep() for _ in range(readers)]
    for number in range(4):
        tier.next_buffer().array[:] = number
        tier.release()
        tier.publish(4)
    assert [each.tolist() for each in kept] == [[3, 1]] * readers
    # Their buffer is not held any longer than they are, and no other one was needed.
    ended = weakref.ref(kept[0].base)
    one, other = tier.next_buffer(), tier._front
    del kept
    assert ended() is None
    tier.publish(0)
    assert (tier.next_buffer(), tier._front) == (other, one)


def test_the_last_reference_may_end_at_any_moment_of_a_wait():
    """The garbage collector may run in the waiting thread at any line of Python."""
    moment, is_ended = 0, True
    while is_ended:
        is_ended = waits_while_a_reference_ends(moment)
        moment += 1
    assert moment > 1


class AnnouncingLock:
    """A lock that sets an event, in one line, before a thread waits for it."""

    def __init__(self, lock, event):
        self._lock, self._event = lock, event
        self.release = lock.release

    def acquire(self, timeout):
        return self._event.set() or self._lock.acquire(timeout=timeout)


def waits_while_a_reference_ends(moment):
    """Wait in a thread which removes the last reference at its `moment`-th line; return whether it has so many."""
    tier, lines, reached = Tier(4), iter(range(moment)), threading.Event()
    held = [tier.newest]
    tier.replace(empty_suffix_array())
    tier._reading = AnnouncingLock(tier._reading, reached)

    def trace(*_):
        if held and next(lines, None) is None:
            held.clear()
        return trace

    def wait():
        sys.settrace(trace)
        tier.wait_for_readers()

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    assert reached.wait(60)
    is_ended = not held
    held.clear()
    waiting.join(60)
    assert not waiting.is_alive(), f"a wait never ended: the last reference was removed at its line {moment}"
    return is_ended
