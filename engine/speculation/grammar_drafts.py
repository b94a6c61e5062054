"""Drafts of requests with a grammar: cut at the first forbidden token, extended where one continuation is possible.

At a position with a single allowed token the target produces this token, whatever its logits, so it is a draft token
that is accepted with probability 1. Jump-ahead decoding (SGLang; Zheng et al., 2024) commits such tokens without a
forward pass of their own; here they are verified like all drafts, which computes their keys and values.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

import numpy as np

from engine.drafters.drafts import Drafts
from engine.drafters.sources import DraftSource
from engine.sampling.grammar_state import GrammarState
from engine.scheduling.sequence import Sequence
from ssd.types import ROOT, DraftBatch

MAX_MASKS_S = 0.02
"""Seconds that the masks of one draft may take. Most take 10 to 100 us each, so that few drafts are cut."""


def follow_grammars(drafts: Drafts, sequences: SequenceOf[Sequence], rooms: np.ndarray) -> Drafts:
    """Return drafts that the grammars of their sequences allow.

    rooms: int64 [B], largest number of tokens of each draft. Such requests are verified exactly, which needs no q.
    """
    parts = []
    for index, (sequence, room) in enumerate(zip(sequences, rooms.tolist(), strict=True)):
        assert sequence.grammar is not None
        most = min(room, int(MAX_MASKS_S / max(sequence.grammar.mask_s, 1e-9)))
        parts.append(follow_grammar(sequence.grammar, drafts.batch.take([index]), most))
    return Drafts(DraftBatch.concatenate(parts))


@dataclass
class _Tree:
    """A draft that is being made, by node."""

    tokens: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    accept_prob: list[float] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)
    path_prob: list[float] = field(default_factory=list)

    def add(self, token: int, parent: int, prob: float, source: int) -> int:
        """Add a node and return its index."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.accept_prob.append(prob)
        self.sources.append(source)
        self.path_prob.append(prob * (1.0 if parent == ROOT else self.path_prob[parent]))
        return len(self.tokens) - 1

    def likeliest(self, count: int) -> DraftBatch:
        """Return the `count` likeliest nodes as a draft."""
        # A child is at most as likely as its parent and was added later, so the stable order is right for both.
        ranked = np.argsort(-np.array(self.path_prob), kind="stable")[:count]
        return DraftBatch.of_nodes(
            np.array(self.tokens), np.array(self.parents, np.int64), np.array(self.accept_prob),
            np.array(self.sources), ranked, np.array([len(ranked)]),
        )  # fmt: skip


def follow_grammar(grammar: GrammarState, draft: DraftBatch, room: int) -> DraftBatch:
    """Return the part of a sequence's draft that a grammar allows, with the tokens that it forces, at most `room`."""
    columns = draft.tokens, draft.parents, draft.accept_prob, draft.source
    tokens, parents, accept_prob, sources = (column.tolist() for column in columns)
    children: dict[int | None, list[int]] = defaultdict(list)
    for node, parent in enumerate(parents):
        children[parent].append(node)
    tree = _Tree()
    # Node of the result, the same node of the draft (None if it is not there), and the state after it.
    ends: deque[tuple[int, int | None, GrammarState]] = deque([(ROOT, ROOT, grammar.copy())] if room else ())
    while ends:
        at, own, state = ends.popleft()
        for token in state.forced(room):
            if not state.accept(token):
                break
            own = next((node for node in children[own] if tokens[node] == token), None)
            at = tree.add(token, at, 1.0, DraftSource.GRAMMAR)
        for node in children[own] if own is not None else ():
            after = state.copy()
            if after.accept(tokens[node]):
                ends.append((tree.add(tokens[node], at, accept_prob[node], sources[node]), node, after))
    return tree.likeliest(room)
