"""Formatting of numbers."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.pages import units


@pytest.mark.parametrize(
    ("unit", "value", "written"),
    [
        (units.count, 0, "0"),
        (units.count, 9_412, "9,412"),
        (units.count, 12_345, "12.3k"),
        (units.count, 999_999, "1.00M"),
        (units.count, 4_560_000_000, "4.56G"),
        (units.size, 812, "812 B"),
        (units.size, 12.3 * 1024**2, "12.3 MiB"),
        (units.share, 0.0, "0%"),
        (units.share, 0.583, "58%"),
        (units.share, 0.042, "4.2%"),
        (units.share, 0.00001, "<0.01%"),
        (units.share, 0.9999, "99.9%"),
        (units.share, 1.0, "100%"),
        (units.ratio, 2.414, "2.41"),
        (units.ratio, 13.52, "13.5"),
        (units.ratio, 3_104, "3,104"),
        (units.duration, 0.00034, "340 µs"),
        (units.duration, 0.0123, "12.3 ms"),
        (units.duration, 0.9999, "1.00 s"),
        (units.duration, 59, "59.0 s"),
        (units.duration, 3_700, "61 min"),
        (units.duration, 2 * 3600 + 60, "2 h 1 min"),
        (units.duration, 3 * 86_400 + 4 * 3600, "3 d 4 h"),
        (units.moment, 0, "1970-01-01 00:00 UTC"),
        (units.moment, 1e300, units.UNKNOWN),
    ],
)
def test_examples(unit, value, written):
    assert unit(value) == written


@pytest.mark.parametrize("unit", [units.count, units.size, units.share, units.ratio, units.duration])
@given(value=st.floats(0, 1e21))
def test_formatted_numbers_are_short(unit, value):
    assert 1 <= len(unit(value if unit is not units.share else math.fmod(value, 1.0))) <= 14
    assert unit(None) == units.UNKNOWN


def test_terminal_escapes_are_replaced():
    assert units.printable("a\x1b[2Jb\nc\u202e") == "a\ufffd[2Jb\ufffdc\ufffd"
    assert units.shortened("x" * 100, 10) == "x" * 9 + "…"


def test_a_single_thing_is_not_plural():
    written = [units.counted(number, "step") for number in (0, 1, 2, 12_345)]
    assert written == ["0 steps", "1 step", "2 steps", "12.3k steps"]
