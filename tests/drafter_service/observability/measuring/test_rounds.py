"""Alternated rounds, and figures over them."""

import pytest

from drafter_service.observability.measuring import rounds
from drafter_service.observability.measuring.rounds import Timer, alternated, columns, median_of, median_ratio


def test_every_case_runs_every_item_and_rounds_begin_with_another_case():
    order = []
    cases = {name: (lambda item, name=name: order.append((item, name)) or f"{name}{item}") for name in "abc"}
    found = list(alternated(cases, range(4)))
    assert "".join(name for _, name in order) == "abc" + "bca" + "cab" + "abc"
    assert [item for item, _ in order] == [number for number in range(4) for _ in cases]
    assert [list(each) for each in found] == [["a", "b", "c"]] * 4
    assert columns(found) == {name: [f"{name}{item}" for item in range(4)] for name in "abc"}


def test_ratios_are_taken_within_a_round():
    slow, fast = [2.0, 4.0, 8.0], [1.0, 1.0, 8.0]
    assert median_of(slow, float) == 4.0
    assert median_ratio(slow, fast, float) == 2.0  # of 2, 4 and 1
    with pytest.raises(ValueError, match="zip"):
        median_ratio(slow, fast[:2], float)


def test_a_timer_adds_up_wall_and_processor_time(monkeypatch):
    wall, cpu = iter([1.0, 3.0, 10.0, 10.5]), iter([0.0, 1.0, 5.0, 5.25])
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: next(wall))
    monkeypatch.setattr(rounds.time, "process_time", lambda: next(cpu))
    timer = Timer()
    for _ in range(2):
        with timer:
            pass
    assert (timer.wall_s, timer.cpu_s) == (2.5, 1.25)
