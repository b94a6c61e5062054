"""Numbers as people write them: 16M tokens, 4G of memory."""

from __future__ import annotations

from decimal import Decimal

import click

LARGEST = 1 << 63
SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}


def parse_quantity(text: str) -> int:
    """500k, 16M, 4G or 16_000_000 as a number. Raises ValueError."""
    lowered = text.strip().lower().replace("_", "").replace(",", "")
    scale = SUFFIXES.get(lowered[-1:], 1)
    try:
        amount = Decimal(lowered.removesuffix(lowered[-1:] if scale > 1 else "")) * scale
        if amount % 1 == 0 and abs(amount) < LARGEST:
            return int(amount)
    except ArithmeticError:
        pass
    raise ValueError(f"{text!r} is no quantity; write 16000000, 500k or 16M")


class Quantity(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no argument
    """A number such as 500k or 16M."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number that `value` says."""
        try:
            return parse_quantity(str(value))
        except ValueError as problem:
            self.fail(str(problem), param, ctx)
