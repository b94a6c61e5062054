"""Histories of samples, and histograms of durations."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.facts import BOUNDS_S, MAX_SAMPLES, History, Latency, Sample


def sample(time):
    return Sample(time, *[0] * 9)


def test_history_is_bounded_and_keeps_the_first_and_the_newest_samples():
    history = History()
    for time in range(20_000):
        history.record(sample(float(time)))
        assert len(history.samples) <= MAX_SAMPLES
    times = [one.time for one in history.samples]
    assert times == sorted(set(times))
    assert times[0] == 0
    assert times[-MAX_SAMPLES // 4 :] == [float(time) for time in range(20_000 - MAX_SAMPLES // 4, 20_000)]
    # The intervals between older samples are larger.
    assert np.diff(times)[: len(times) // 8].mean() > 10 * np.diff(times)[len(times) // 2 :].mean()


def test_history_continues_when_the_clock_jumps():
    history = History()
    for time in (100.0, 110.0, 5000.0, 5010.0, 120.0, 130.0, 130.0, 9000.0, 140.0):
        history.record(sample(time))
    assert [each.time for each in history.samples] == [100.0, 110.0, 120.0, 130.0, 140.0]


@given(st.lists(st.floats(1e-7, 100), max_size=50), st.sampled_from([0.01, 0.5, 0.9, 0.99, 1.0]))
def test_quantiles_are_exact_to_a_bin(durations, share):
    latency = Latency()
    for duration in durations:
        latency.record(duration)
    assert latency.count == len(durations)
    longest = max(durations, default=0.0)
    exact = float(np.quantile(durations, share, method="inverted_cdf")) if durations else 0.0
    assert latency.quantile(share) == min([*(bound for bound in BOUNDS_S if bound >= exact), longest][0], longest)
