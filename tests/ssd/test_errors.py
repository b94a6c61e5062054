"""Messages about failures, and the end of drafting after repeated ones."""

from ssd.errors import MAX_FAILURES, REPORT_INTERVAL_S, Failures


def test_failures_are_reported_once_a_minute_with_their_number():
    now = 5.0
    failures = Failures(clock=lambda: now)
    assert failures.add() == "continuing without its drafts"
    assert [failures.add(), failures.add(2)] == [None, None]
    now += REPORT_INTERVAL_S
    assert failures.add() == "continuing without its drafts (4 failures since the last message)"
    assert failures.add() is None
    assert failures.count == 6


def test_drafting_ends_after_failures_in_a_row():
    failures = Failures(clock=lambda: 0.0)
    for _ in range(2):
        assert not any("off" in (failures.add() or "") for _ in range(MAX_FAILURES - 1))
        failures.succeeded()
    messages = [failures.add() for _ in range(MAX_FAILURES + 5)]
    assert [at for at, message in enumerate(messages, 1) if message is not None] == [MAX_FAILURES]
    assert "restarted" in messages[MAX_FAILURES - 1]
    failures.succeeded()
    assert failures.is_off
