"""Drafts of requests with a grammar: cut at the first forbidden token, extended where one continuation is possible.

At a position with a single allowed token the target produces this token, whatever its logits, so it is a draft token
that is accepted with probability 1. Jump-ahead decoding (SGLang; Zheng et al., 2024) commits such tokens without a
forward pass of their own; here they are verified like all drafts, which computes their keys and values.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf

import numpy as np

from engine.drafters.draft_pool import DraftPool, drafts_of
from engine.drafters.drafts import DETERMINISTIC, Drafts
from engine.drafters.sources import DraftSource
from engine.sampling.grammar_state import GrammarState
from engine.scheduling.sequence import Sequence
from ssd.types import ROOT, DraftBatch

NO_Q = np.array([DETERMINISTIC])
MAX_MASKS_S = 0.02
"""Seconds that the masks of one draft may take. Most take 10 to 100 us each, so that few drafts are cut."""


def follow_grammars(drafts: Drafts, sequences: SequenceOf[Sequence], rooms: np.ndarray) -> Drafts:
    """Return drafts that the grammars of their sequences allow.

    rooms: int64 [B], largest number of tokens of each draft. Such requests are verified exactly, which needs no q.
    """
    pool, sources, limits = DraftPool(), list[int](), np.array(rooms)
    for index, sequence in enumerate(sequences):
        assert sequence.grammar is not None
        limits[index] = min(limits[index], int(MAX_MASKS_S / max(sequence.grammar.mask_s, 1e-9)))
        if limits[index]:
            _follow(sequence.grammar, drafts.batch.take([index]), int(limits[index]), pool, index, sources)
    return drafts_of(pool.nodes, limits, np.array(sources, np.uint8))


def _follow(
    grammar: GrammarState, draft: DraftBatch, room: int, pool: DraftPool, index: int, sources: list[int]
) -> None:
    """Add the tokens of one draft that a grammar allows, and those that it forces, to a pool.

    room: largest number of tokens that are forced after a node. index: index of the sequence. sources: of the nodes in
    the pool, a `DraftSource` each.
    """

    def add(token: int, parent: int, prob: float, source: int) -> int:
        """Add a node and return its index."""
        probs, no_scores = np.array([[prob]], np.float32), np.zeros((1, 1), np.float32)
        pool.add(np.array([index]), np.array([parent]), np.array([[token]]), no_scores, probs, NO_Q)
        sources.append(source)
        return len(pool) - 1

    tokens, accept_prob, draft_sources = draft.tokens.tolist(), draft.accept_prob.tolist(), draft.source.tolist()
    children: dict[int | None, list[int]] = defaultdict(list)
    for node, parent in enumerate(draft.parents.tolist()):
        children[parent].append(node)
    # Node in the pool, the same node of the draft (None if it is not there), and the state after it.
    ends: deque[tuple[int, int | None, GrammarState]] = deque([(ROOT, ROOT, grammar.copy())])
    while ends:
        at, own, state = ends.popleft()
        for token in state.forced(room):
            if not state.accept(token):
                break
            own = next((node for node in children[own] if tokens[node] == token), None)
            at = add(token, at, 1.0, DraftSource.GRAMMAR)
        for node in children[own] if own is not None else ():
            after = state.copy()
            if after.accept(tokens[node]):
                ends.append((add(tokens[node], at, accept_prob[node], draft_sources[node]), node, after))
