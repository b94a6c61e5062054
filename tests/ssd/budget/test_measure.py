"""The curve that is measured at the start, with a simulated clock."""

import numpy as np
import pytest

from ssd.budget import curve as measure
from ssd.budget.curve import MANY_SEQUENCES, measured_curve


class Machine:
    """A machine on which a step takes `seconds_of(tokens, sequences)`, and each third step a second more."""

    def __init__(self, monkeypatch, seconds_of):
        self.now, self.ran, self._seconds_of = 0.0, [], seconds_of
        monkeypatch.setattr(measure, "perf_counter", lambda: self.now)

    def run(self, tokens, sequences):
        self.ran.append((tokens, sequences))
        self.now += self._seconds_of(tokens * sequences, sequences) + (len(self.ran) % 3 == 0)


def seconds_of(tokens, sequences):
    return 0.01 + 0.001 * tokens + 0.002 * (sequences - 1)


def test_disturbed_steps_do_not_count(monkeypatch):
    machine = Machine(monkeypatch, seconds_of)
    curve = measured_curve(machine.run, (1, 4))
    assert curve.seconds(np.array([1, 2, 4]), 1) == pytest.approx([0.011, 0.012, 0.014])


def test_the_time_per_sequence_is_measured_with_one_token_each(monkeypatch):
    machine = Machine(monkeypatch, seconds_of)
    curve = measured_curve(machine.run, (1, 16), sequences=64)
    assert {(1, MANY_SEQUENCES)} == {each for each in machine.ran if each[1] > 1}
    for sequences in (1, 2, 64):
        assert float(curve.seconds(16, sequences)) == pytest.approx(seconds_of(16, sequences))


def test_slow_machines_measure_two_sizes(monkeypatch):
    machine = Machine(monkeypatch, lambda tokens, sequences: 10.0 * tokens)
    curve = measured_curve(machine.run, (1, 2, 4, 8))
    assert {tokens for tokens, _ in machine.ran} == {1, 2}
    assert float(curve.seconds(8, 1)) == pytest.approx(80.0)
