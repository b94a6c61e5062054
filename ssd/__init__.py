"""A drafter for speculative decoding that remembers every token a service has seen.

    from ssd import DrafterConfig, SuffixDrafter

Names are loaded on first use: importing the package costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd.config import DrafterConfig as DrafterConfig
    from ssd.drafter import SuffixDrafter as SuffixDrafter
    from ssd.types import DraftBatch as DraftBatch
    from ssd.types import Drafter as Drafter
    from ssd.types import Progress as Progress

_HOMES = {
    "DraftBatch": "ssd.types",
    "Drafter": "ssd.types",
    "DrafterConfig": "ssd.config",
    "Progress": "ssd.types",
    "SuffixDrafter": "ssd.drafter",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
