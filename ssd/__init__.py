"""Drafters for speculative decoding that remember every token a service has seen.

    from ssd import Corpus, DrafterConfig, SuffixDrafter, snapshot

Names are imported on first use, so that importing the package is cheap.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ssd.baselines.classic import ClassicDrafter as ClassicDrafter
    from ssd.config import DrafterConfig as DrafterConfig
    from ssd.corpus import snapshot as snapshot
    from ssd.corpus.corpus import Corpus as Corpus
    from ssd.corpus.rollout import Rollout as Rollout
    from ssd.drafter import SuffixDrafter as SuffixDrafter
    from ssd.types import DraftBatch as DraftBatch
    from ssd.types import Drafter as Drafter
    from ssd.types import Progress as Progress

_MODULES = {
    "ClassicDrafter": "ssd.baselines.classic",
    "Corpus": "ssd.corpus.corpus",
    "DraftBatch": "ssd.types",
    "Drafter": "ssd.types",
    "DrafterConfig": "ssd.config",
    "Progress": "ssd.types",
    "Rollout": "ssd.corpus.rollout",
    "SuffixDrafter": "ssd.drafter",
    "snapshot": "ssd.corpus.snapshot",
}
"""The module of each public name; `snapshot` is a module itself."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> object:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = import_module(_MODULES[name])
    return module if name == "snapshot" else getattr(module, name)
