"""REST (He et al., 2024): draft from a read-only corpus.

The corpus is searched, and drafts are chosen, as by the suffix drafter; the original ranks continuations by their
frequency after the longest match. Nothing is added to the corpus: only the calibration of probabilities learns. Unlike
the original, the drafter also searches the request's own text, as the suffix drafter does.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np

from engine.drafters.sources import DraftSource
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import read_sections
from ssd.drafter import SuffixDrafter
from ssd.errors import UserError
from ssd.types import DraftBatch, Progress


class RestDrafter(SuffixDrafter):
    """Drafts from a corpus that stays as it is, and from each request's own text."""

    PUBLISHES = False

    def __init__(self, config: DrafterConfig, corpus: Corpus) -> None:
        """config: settings; capacity and match depth are those of the corpus. `close` closes the corpus."""
        config = replace(config, capacity=corpus.capacity, match_depth=corpus.depth)
        super().__init__(config, corpus=corpus, remember=lambda *_: None)
        corpus.maintain(config.refresh_interval_s)

    def close(self) -> None:
        """Remove running sequences and close the corpus."""
        super().close()
        self.corpus.close()

    def _step(self, rows: np.ndarray, progress: Progress) -> DraftBatch:
        batch = super()._step(rows, progress)
        source = np.where(batch.source == DraftSource.CORPUS, np.uint8(DraftSource.REST), batch.source)
        return replace(batch, source=source)


def check_snapshot(path: Path, vocab_size: int) -> None:
    """Raise UserError for a file that is not a snapshot, or that has token ids of `vocab_size` or more."""
    text = read_sections(path)["text"]
    largest = int(text[text != SEPARATOR].max(initial=0))
    if largest >= vocab_size:
        raise UserError(
            f"{path} has the token id {largest}, but the target's vocabulary ends at {vocab_size - 1}; "
            "make it again with the target's tokenizer"
        )


def load_corpus(path: Path, vocab_size: int) -> Corpus:
    """Return the corpus of a snapshot. Raises UserError for a file that cannot be used."""
    check_snapshot(path, vocab_size)
    return snapshot.load(path).corpus
