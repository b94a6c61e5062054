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

    def run(self, steps, *, step_s, accepted, wants=True, disturbed=0.0, catch_up=0):
        """step_s: duration of a step that drafts. accepted: mean number of accepted tokens of a draft. disturbed:
        fraction of steps that take longer by ten plain steps. catch_up: time to write the slots that plain steps left,
        in plain steps.
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
            seconds = step_s if is_drafting else PLAIN_S
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


@pytest.mark.parametrize(("sequences", "in_flight"), [(1, 1), (16, 0)])
@pytest.mark.parametrize(("cost", "accepted"), [(1.1, 0), (3, 1.5), (10, 1)])
def test_a_drafter_that_does_not_pay_takes_little_time(cost, accepted, sequences, in_flight):
    device = Device(sequences=sequences, in_flight=in_flight)
    device.run(16_000, step_s=cost * PLAIN_S, accepted=accepted)
    assert 0.97 < device.speed < 1
    assert sum(device.drafted[8000:]) > 0


@pytest.mark.parametrize(("cost", "accepted"), [(1.2, 0.5), (1.5, 1), (2, 2)])
def test_a_drafter_that_pays_is_not_stopped(cost, accepted):
    device = Device()
    device.run(4000, step_s=cost * PLAIN_S, accepted=accepted)
    assert device.speed > 0.97 * (1 + accepted) / cost
    # Plain steps are run now and then, so that their duration stays known.
    assert device.drafted[-DRAFTING_RUNS[0] - 20 :].count(False) > 0


@pytest.mark.parametrize("in_flight", [0, 1])
def test_the_time_to_catch_up_counts_but_does_not_end_the_trial(in_flight):
    paying, useless = Device(in_flight=in_flight), Device(in_flight=in_flight)
    paying.run(4000, step_s=1.5 * PLAIN_S, accepted=1, catch_up=40)
    assert np.mean(paying.drafted) > 0.9
    useless.run(20_000, step_s=1.5 * PLAIN_S, accepted=0.2, catch_up=40)
    assert 0.97 < useless.speed < 1


def test_disturbed_steps_do_not_stop_a_drafter_that_pays():
    device = Device()
    device.run(4000, step_s=1.5 * PLAIN_S, accepted=1, disturbed=0.05)
    assert np.mean(device.drafted) > 0.9


def test_drafting_follows_a_change_of_the_text():
    device = Device()
    for accepted, drafts in ((2, True), (0, False), (2, True)):
        device.run(1500, step_s=1.5 * PLAIN_S, accepted=accepted)
        assert (np.mean(device.drafted[-500:]) > 0.9) == drafts
    assert device.speed > 1


@pytest.mark.parametrize("factor", [0.5, 2])
@pytest.mark.parametrize(("accepted", "drafts"), [(0.3, False), (1, True)])
def test_a_wrong_measurement_is_corrected(factor, accepted, drafts):
    device = Device(measured_s=factor * PLAIN_S)
    device.run(2000, step_s=1.5 * PLAIN_S, accepted=accepted)
    assert (np.mean(device.drafted[-500:]) > 0.9) == drafts
    assert device.speed > 0.97


def test_one_slow_step_does_not_change_the_duration_of_plain_steps():
    device = Device()
    device.run(4, step_s=PLAIN_S, accepted=0)
    device.drafting.record(*[counted_plan()] * 2, 1, 100.0)
    device.run(3000, step_s=1.5 * PLAIN_S, accepted=0)
    assert device.speed > 0.97


def test_steps_with_prompts_are_not_counted():
    device = Device()
    prompt = counted_plan(0, prompt_tokens=64, is_drafting=True)
    for _ in range(50):
        device.drafting.record(prompt, prompt, 0, 100.0)
    device.run(100, step_s=1.5 * PLAIN_S, accepted=2)
    assert device.speed > 1


def test_plain_steps_of_requests_without_drafts_do_not_stop_others():
    device = Device()
    device.run(500, step_s=2 * PLAIN_S, accepted=3, wants=False)
    device.run(100, step_s=2 * PLAIN_S, accepted=3)
    assert all(device.drafted[500:])
