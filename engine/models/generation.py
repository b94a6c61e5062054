"""Sampling settings that a model's publisher recommends, from its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.models.files import read_json, token_ids
from engine.scheduling.request import MAX_REPETITION, MIN_REPETITION
from ssd.errors import UserError

GENERATION_FILE = "generation_config.json"

IN_RANGE: dict[str, tuple[Callable[[Any], float], Callable[[float], bool], str]] = {
    "temperature": (float, lambda value: 0 <= value < float("inf"), "0 or more"),
    "top_k": (int, lambda value: value >= 0, "0 or more"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (float, lambda value: MIN_REPETITION <= value <= MAX_REPETITION, "between 0.01 and 100"),
    "max_new_tokens": (int, lambda value: value >= 1, "at least 1"),
}
"""Type, check and description of the range of each field."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommended settings; None: no recommendation."""

    temperature: float | None = None
    """0 is greedy decoding."""
    top_k: int | None = None
    """0 is no limit."""
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the recommendations of a model folder, if it has any. Raises UserError for invalid values."""
    path = folder / GENERATION_FILE
    if not path.exists():
        return GenerationDefaults()
    fields = read_json(path)
    values: dict[str, Any] = {}
    try:
        for name, (convert, is_valid, range_text) in IN_RANGE.items():
            if fields.get(name) is None:
                continue
            values[name] = convert(fields[name])
            if not is_valid(values[name]):
                raise ValueError(f"{name} must be {range_text}, not {values[name]}")
        if fields.get("do_sample") is False:
            # An explicit false means greedy decoding; without the field, the sampling settings apply.
            values["temperature"] = 0.0
        return GenerationDefaults(**values, eos_token_ids=token_ids(fields.get("eos_token_id")))
    except (TypeError, ValueError, OverflowError) as problem:
        raise UserError(f"{path} has an invalid field: {problem}; correct it or download it again") from None
