"""Sampling parameters and end tokens that a model's publisher recommends, from its `generation_config.json`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engine.models.files import read_json, token_ids
from engine.scheduling.request import SamplingParams
from ssd.errors import UserError

GENERATION_FILE = "generation_config.json"

SAMPLING: dict[str, type[int] | type[float]] = {
    "temperature": float, "top_k": int, "top_p": float, "min_p": float, "repetition_penalty": float,
}  # fmt: skip
"""Parameters that are read, named as in `SamplingParams`, with their types."""


@dataclass(frozen=True)
class GenerationDefaults:
    """Recommendations of a model's publisher."""

    sampling: dict[str, float] = field(default_factory=dict)
    """Recommended values of parameters in `SAMPLING`."""
    eos_token_ids: tuple[int, ...] = ()


def load_generation_defaults(folder: Path) -> GenerationDefaults:
    """Return the recommendations of a model folder, if it has any. Raises UserError for invalid values."""
    path = folder / GENERATION_FILE
    if not path.exists():
        return GenerationDefaults()
    fields = read_json(path)
    try:
        sampling = {name: kind(fields[name]) for name, kind in SAMPLING.items() if fields.get(name) is not None}
        given: dict[str, Any] = {**sampling}
        SamplingParams(**given)  # checks the ranges
        if fields.get("do_sample") is False:
            # An explicit false means greedy decoding; without the field, the sampling settings apply.
            sampling["temperature"] = 0.0
        return GenerationDefaults(sampling, token_ids(fields.get("eos_token_id")))
    except (TypeError, ValueError, OverflowError, UserError) as problem:
        raise UserError(f"{path} has an invalid field: {problem}; correct it or download it again") from None
