"""Integers with suffixes: 16M tokens, 4G of memory."""

from __future__ import annotations

from decimal import Decimal

import click

LARGEST = 1 << 63
SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def parse_quantity(text: str) -> int:
    """Parse an integer such as 500k, 16M, 4G or 16_000_000. Raises ValueError."""
    lowered = text.strip().lower().replace("_", "").replace(",", "")
    scale = SUFFIXES.get(lowered[-1:], 1)
    try:
        amount = Decimal(lowered.removesuffix(lowered[-1:] if scale > 1 else "")) * scale
        if amount % 1 == 0 and abs(amount) < LARGEST:
            return int(amount)
    except ArithmeticError:
        pass
    raise ValueError(f"{text!r} is not a number such as 16000000, 500k or 16M")


class Quantity(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no argument
    """Option type for integers such as 500k or 16M."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert an option's text."""
        try:
            return parse_quantity(str(value))
        except ValueError as problem:
            self.fail(str(problem), param, ctx)
