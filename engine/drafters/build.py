"""From the name of a drafter to the drafter."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

from ssd.config import DrafterConfig
from ssd.draft import Drafter

DrafterName = Literal["none", "ngram", "ssd", "ssd-remote"]
DRAFTER_NAMES: tuple[str, ...] = get_args(DrafterName)


def build_drafter(name: str, config: DrafterConfig, address: str, warn: Callable[[str], None]) -> Drafter:
    """The drafter called `name`: `config` is for an embedded one, `address` for a remote one.

    `warn` is told once if a remote one goes away; the engine then runs on without drafts.
    Raises UserError if no drafter service answers at `address`.
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

        return DrafterClient(
            address,
            on_lost=lambda reason: warn(f"the drafter at {address} went away ({reason}); going on without drafts"),
        )
    raise ValueError(f"drafters are {', '.join(DRAFTER_NAMES)}, not {name!r}")
