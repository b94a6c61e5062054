"""Records of prepared and running sequences; `ssd.sequences.tables` has the rows of running ones."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

import numpy as np

from ssd.corpus.rollout import NO_TAG, Rollout
from ssd.sequences.local_index import LocalIndex


@dataclass(eq=False)
class Running:
    """A running sequence, apart from its row in the tables."""

    first_learned: int
    """Index of the first token that is remembered when the sequence finishes; prompt tokens before it are not."""
    published: int
    """Number of tokens that other sequences could see when publishing last started or stopped."""
    given: int
    """Number of tokens that it began with: the prompt, and what was committed elsewhere."""
    session_id: Hashable
    request_id: str | None
    turns: frozenset[str | None]
    """Request ids of this request and of the earlier turns of its session."""
    learn: bool
    """Whether its output may be drafted for other sequences; cleared when its request id is forgotten."""
    rollout: Rollout | None
    """What it samples; None if it is no rollout."""
    seed: int | None
    """Seed of the target's noise; None: greedy, or not known."""
    hinted: int
    """Number of tokens of hints, which precede the prompt."""
    is_kept: bool = True
    """Whether the session's next turn may reuse its index."""
    row: int = -1
    """Row in the tables; -1 before the sequence begins."""

    @property
    def tag(self) -> int:
        """Tag of its text, see `Rollout.tag`."""
        return NO_TAG if self.rollout is None else self.rollout.tag


@dataclass(eq=False)
class PreparedSequence:
    """A sequence that is ready for `CorpusDrafter.begin`."""

    text: np.ndarray
    """uint32 [N]: the prompt and the tokens that were committed elsewhere."""
    local: LocalIndex
    running: Running
    is_predicted: bool = False
    """Whether the output is expected to repeat the text from its beginning."""
    is_indexed: bool = False

    @property
    def learned(self) -> np.ndarray:
        """The part of the text that is remembered with the output, uint32."""
        return self.text[self.running.first_learned :]

    def index(self) -> None:
        """Index the text, about 0.2 us per token, unless it is indexed already. Any thread may call it."""
        if not self.is_indexed:
            self.local.continue_with(self.text)
            self.is_indexed = True
