"""Sampling parameters and end tokens that a model's publisher recommends, from its `generation_config.json`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from engine.models.files import read_json, token_ids
from engine.scheduling.request import MAX_REPETITION, MIN_REPETITION
from ssd.errors import UserError

GENERATION_FILE = "generation_config.json"

RANGES: dict[str, tuple[type[int] | type[float], Callable[[float], bool], str]] = {
    "temperature": (float, lambda value: 0 <= value < float("inf"), "0 or more"),
    "top_k": (int, lambda value: value >= 0, "0 or more"),
    "top_p": (float, lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (float, lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (float, lambda value: MIN_REPETITION <= value <= MAX_REPETITION, "between 0.01 and 100"),
}
"""Type, check and description of the range of each parameter that is read, named as in `SamplingParams`."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations of a model's publisher."""

    sampling: dict[str, float] = field(default_factory=dict)
    """Recommended values of parameters in `RANGES`."""
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the recommendations of a model folder, if it has any. Raises UserError for invalid values."""
    path = folder / GENERATION_FILE
    if not path.exists():
        return GenerationDefaults()
    fields = read_json(path)
    sampling: dict[str, float] = {}
    try:
        for name, (convert, is_valid, range_text) in RANGES.items():
            if fields.get(name) is None:
                continue
            sampling[name] = convert(fields[name])
            if not is_valid(sampling[name]):
                raise ValueError(f"{name} must be {range_text}, not {sampling[name]}")
        if fields.get("do_sample") is False:
            # An explicit false means greedy decoding; without the field, the sampling settings apply.
            sampling["temperature"] = 0.0
        return GenerationDefaults(sampling, token_ids(fields.get("eos_token_id")))
    except (TypeError, ValueError, OverflowError) as problem:
        raise UserError(f"{path} has an invalid field: {problem}; correct it or download it again") from None
