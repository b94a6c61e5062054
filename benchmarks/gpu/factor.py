"""The type of an option that multiplies time limits."""

from __future__ import annotations

import argparse
from math import isfinite


def factor(text: str) -> float:
    """Parse a number above 0. Raises argparse.ArgumentTypeError."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not (isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} is no number above 0")
    return value
