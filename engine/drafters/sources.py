"""Sources of draft tokens: their codes in `DraftBatch.source`, their names in reports, and counts by source."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import NamedTuple

import numpy as np

from ssd.types import Source


class DraftSource(IntEnum):
    """Origin of a draft token. The first codes are those of `ssd.types.Source`; unknown codes count as `OTHER`."""

    CORPUS = Source.CORPUS
    LOCAL = Source.LOCAL
    FALLBACK = Source.FALLBACK
    LIBRARY = Source.LIBRARY
    DRAFT_MODEL = 4
    SELF_INT8 = 5
    MTP = 6
    EAGLE = 7
    EAGLE3 = 8
    MEDUSA = 9
    LOOKAHEAD = 10
    RECYCLE = 11
    REST = 12
    GRAMMAR = 13
    """The only token that the grammar of a request allows, whichever drafter proposed it."""
    OTHER = 255
    """For drafters that are not part of this package."""


SOURCE_NAMES = tuple(source.name.lower().replace("_", "-") for source in DraftSource)
"""Names in reports, in the order of the codes: `corpus`, `local`, `fallback`, drafter kinds, and finally `other`."""
NO_SOURCES = np.empty(0, np.uint8)


class DraftCounts(NamedTuple):
    """Numbers of draft tokens that the target verified and accepted."""

    drafted: int
    accepted: int


NO_DRAFTS = DraftCounts(0, 0)


def count_sources(sources: np.ndarray) -> np.ndarray:
    """Return the number of tokens of each source, int64 [len(SOURCE_NAMES)].

    sources: uint8 [T], the code of each token.
    """
    return np.bincount(np.minimum(sources, len(SOURCE_NAMES) - 1), minlength=len(SOURCE_NAMES))


def counts_by_name(drafted: np.ndarray, accepted: np.ndarray) -> dict[str, DraftCounts]:
    """Return the counts of each source that drafted anything, by its name.

    drafted, accepted: int64 [len(SOURCE_NAMES)], numbers of verified and of accepted draft tokens, see `count_sources`.
    """
    columns = zip(SOURCE_NAMES, drafted.tolist(), accepted.tolist(), strict=True)
    return {name: DraftCounts(*counts) for name, *counts in columns if counts[0]}


def sum_by_name(parts: Iterable[Mapping[str, DraftCounts]]) -> dict[str, DraftCounts]:
    """Return the sums of several counts by name, in the order of `SOURCE_NAMES`."""
    drafted, accepted = Counter[str](), Counter[str]()
    for part in parts:
        for name, counts in part.items():
            drafted[name] += counts.drafted
            accepted[name] += counts.accepted
    return {name: DraftCounts(drafted[name], accepted[name]) for name in SOURCE_NAMES if drafted[name]}
