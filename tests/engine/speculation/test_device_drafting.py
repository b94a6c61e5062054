"""Which steps draft on the device, with durations that do not depend on the machine."""

import numpy as np
import pytest

from engine.speculation.selection import DRAFTING_RUNS, DeviceDrafting
from tests.curves import curve_of
from tests.engine.steps import counted_plan

PLAIN_S = 0.005


class Device:
    """Runs steps with one in flight, or none."""

    def __init__(self, *, sequences=1, in_flight=1, measured_s=PLAIN_S, seed=0):
        self.drafting = DeviceDrafting(curve_of([(sequences, measured_s), (sequences + 1, measured_s)]))
        self.seconds = self.plain_s = 0.0
        self.drafted = []
        self._sequences = sequences
        self._in_flight = [None] * in_flight
        self._rng = np.random.default_rng(seed)

    def run(self, steps, *, cost, accepted, wants=True, disturbed=0.0, catch_up=0):
        """cost: duration of a step that drafts, in plain steps. accepted: mean number of accepted tokens of a draft.
        disturbed: fraction of steps that take longer by ten plain steps. catch_up: time to write the slots that plain
        steps left, in plain steps.
        """
        for _ in range(steps):
            is_drafting = wants and not self.drafting.is_backing_off
            self.drafted.append(is_drafting)
            # A draft that the step before made is verified.
            accepts = is_drafting and len(self.drafted) > 1 and self.drafted[-2]
            tokens = self._sequences + (int(self._rng.poisson(accepted, self._sequences).sum()) if accepts else 0)
            plan = counted_plan(self._sequences, is_drafting=is_drafting)
            self._in_flight.append((plan, tokens))
            committed = self._in_flight.pop(0)
            seconds = (cost if is_drafting else 1) * PLAIN_S
            if is_drafting and self.drafted[-2:-1] != [True]:
                seconds += catch_up * PLAIN_S
            if self._rng.random() < disturbed:
                seconds += 10 * PLAIN_S
            self.seconds += seconds
            self.plain_s += PLAIN_S * tokens / self._sequences
            if committed is not None:
                self.drafting.record(committed[0], plan, committed[1], seconds)

    @property
    def speed(self):
        """Tokens per second, as a fraction of those of plain steps."""
        return self.plain_s / self.seconds


USELESS = [
    *(({}, {"cost": cost, "accepted": accepted}) for cost, accepted in ((1.1, 0), (3, 1.5), (10, 1))),
    ({"sequences": 16, "in_flight": 0}, {"cost": 3, "accepted": 1.5}),
    *(({"in_flight": in_flight}, {"cost": 1.5, "accepted": 0.2, "catch_up": 40}) for in_flight in (0, 1)),
    *(({"measured_s": factor * PLAIN_S}, {"cost": 1.5, "accepted": 0.3}) for factor in (0.5, 2)),
]  # fmt: skip
"""Settings of the device and of its steps."""


@pytest.mark.parametrize(("device", "steps"), USELESS)
def test_a_drafter_that_does_not_pay_takes_little_time(device, steps):
    device = Device(**device)
    device.run(12_000, **steps)
    assert 0.97 < device.speed < 1
    assert 0 < sum(device.drafted[4000:]) < 900, "it is tried again now and then"


PAYING = [
    *(({}, {"cost": cost, "accepted": accepted}) for cost, accepted in ((1.2, 0.5), (1.5, 1), (2, 2))),
    *(({"in_flight": in_flight}, {"cost": 1.5, "accepted": 1, "catch_up": 40}) for in_flight in (0, 1)),
    *(({"measured_s": factor * PLAIN_S}, {"cost": 1.5, "accepted": 1}) for factor in (0.5, 2)),
    ({}, {"cost": 1.5, "accepted": 1, "disturbed": 0.05}),
]


@pytest.mark.parametrize(("device", "steps"), PAYING)
def test_a_drafter_that_pays_is_not_stopped(device, steps):
    """Neither by the time to catch up, a wrong measurement or disturbed steps."""
    device = Device(**device)
    device.run(4000, **steps)
    assert np.mean(device.drafted[500:]) > 0.9
    # Plain steps are run now and then, so that their duration stays known.
    assert device.drafted[-DRAFTING_RUNS[0] - 20 :].count(False) > 0
    if not steps.keys() & {"catch_up", "disturbed"}:
        assert device.speed > 0.97 * (1 + steps["accepted"]) / steps["cost"]


def test_drafting_follows_a_change_of_the_text():
    device = Device()
    for accepted, drafts in ((2, True), (0, False), (2, True)):
        device.run(1500, cost=1.5, accepted=accepted)
        assert (np.mean(device.drafted[-500:]) > 0.9) == drafts
    assert device.speed > 1


def test_one_slow_step_does_not_change_the_duration_of_plain_steps():
    device = Device()
    device.run(4, cost=1, accepted=0)
    device.drafting.record(*[counted_plan()] * 2, 1, 100.0)
    device.run(3000, cost=1.5, accepted=0)
    assert device.speed > 0.97


def test_steps_with_prompts_are_not_counted():
    device = Device()
    prompt = counted_plan(0, prompt_tokens=64, is_drafting=True)
    for _ in range(50):
        device.drafting.record(prompt, prompt, 0, 100.0)
    device.run(100, cost=1.5, accepted=2)
    assert device.speed > 1


def test_plain_steps_of_requests_without_drafts_do_not_stop_others():
    device = Device()
    device.run(500, cost=2, accepted=3, wants=False)
    device.run(100, cost=2, accepted=3)
    assert all(device.drafted[500:])
