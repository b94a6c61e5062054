"""Profiles from data sheets."""

import pytest

from engine.drafters.registry import KINDS
from ssd.budget.roofline import GPUS, SIZES, roofline
from ssd.errors import UserError


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("size", SIZES)
def test_rooflines_grow_with_the_step_and_the_depth(gpu, size):
    profile = roofline(gpu, size)
    steps = [profile.step(tokens, 1) for tokens in (1, 16, 256, 4096)]
    assert steps == sorted(steps)
    assert steps[-1] > 2 * steps[0]  # limited by arithmetic
    assert profile.source == "roofline"
    for kind in profile.drafter_ms:
        assert kind in KINDS
        assert profile.drafting(kind, 2, 1) == pytest.approx(2 * profile.drafting(kind, 1, 1))
        assert profile.drafting(kind, 1, 1) < profile.step(1, 1)


def test_a_roofline_is_bandwidth_for_small_steps_and_arithmetic_for_large_ones():
    profile = roofline("h100", "8b")
    cache = 1024 * 32 * 2048
    assert profile.step(1, 1) == pytest.approx(1e3 * 2 * (7.5e9 + cache) / 3.35e12)
    assert profile.step(4096, 1) == pytest.approx(1e3 * 2 * 7.5e9 * 4096 / 989e12)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="--gpu z: unknown"):
        roofline("z", "8b")
