"""From the name of a drafter to the drafter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Literal, get_args

from ssd.config import DrafterConfig
from ssd.types import Drafter

DrafterName = Literal["none", "ngram", "ssd", "ssd-remote"]
DEADLINE_S = 0.01
"""Of a remote drafter's answer: a fraction of a step that it may spare on a CPU."""
DRAFTER_NAMES: tuple[str, ...] = get_args(DrafterName)


def build_drafter(
    name: str, config: DrafterConfig, address: str, warn: Callable[[str], None], model: Path | None = None
) -> Drafter:
    """The drafter called `name`: `config` is for an embedded one, `address` for a remote one.

    `warn` is told whenever a remote one goes away; the engine then runs on without drafts until it is back. `model`:
    the folder of the target, which decides what namespace of a service it drafts from. Raises UserError if no drafter
    service answers at `address`, or it does not serve this model.
    """
    # Imported here, so that each kind costs only those who ask for it.
    if name == "none":
        from engine.drafters.none import NoDrafter

        return NoDrafter()
    if name == "ngram":
        from engine.drafters.ngram import NgramDrafter

        return NgramDrafter()
    if name == "ssd":
        from ssd.drafter import SuffixDrafter

        return SuffixDrafter(config)
    if name == "ssd-remote":
        from drafter_service.client import DrafterClient
        from drafter_service.client.identity import model_identity

        return DrafterClient(
            address,
            deadline_s=DEADLINE_S,
            model=model_identity(model) if model is not None else None,
            on_lost=lambda reason: warn(f"the drafter at {address} went away ({reason}); going on without drafts"),
        )
    raise ValueError(f"drafters are {', '.join(DRAFTER_NAMES)}, not {name!r}")
