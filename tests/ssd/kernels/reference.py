"""Slow reference of a draft: candidates, their probabilities, growth and learning, from the gathered evidence."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from ssd import SuffixDrafter
from ssd.kernels.candidates import CONSIDERED, DROPPED_MISSES
from ssd.kernels.estimate import BLEND_PRIOR
from ssd.kernels.grow import EXPLORED, MIN_SCORE
from ssd.kernels.probabilities import (
    FINAL_SEEN_CAP,
    GLOBAL,
    LEARNING_RATE,
    LEVELS,
    LOCAL,
    MEAN,
    OF_LIBRARIES,
    OF_SHORTER,
    SEEN,
    SEEN_CAP,
    SET_BUCKET,
    SET_LENGTHS,
    SETS,
    TOKEN_SEEN_CAP,
    bucket,
    fast_logit,
    fast_sigmoid,
    final_cell,
    match_cell,
    match_cells,
    pair_cells,
    pointer_cell,
    second_cells,
    token_cells,
    token_share,
)
from ssd.sequences.tables import ABSENT, EVIDENCE, KEPT, KEPT_FOR_PATH, LIBRARY, MISSES, POINTERS, RUNS, TEXT
from tests.curves import speedup_of
from tests.naive import SEPARATOR
from tests.ssd.addresses import uint32_at

NO_POINTER = -1
SECOND = GLOBAL, 1
"""Source and number of the corpus's second level."""


@dataclass
class Level:
    """A level of a source's evidence at a node: the tokens that follow the samples that agree with the path."""

    following: list[int]
    newest: int
    age: int
    total: int
    length: int

    def count(self, token: int) -> int:
        return self.following.count(token)


@dataclass
class Candidate:
    """A token that may follow a node."""

    token: int
    score: float
    inputs: dict[int, tuple[int, float]] = field(default_factory=dict)
    """By index of the input: its cell (-1 for a blend), and its value."""
    source: int = GLOBAL
    """Source of the longest match that the token follows."""
    final_cell: int = 0
    mixed: float = 0.0
    prob: float = 0.0


@dataclass
class NodeReference:
    """What the reference computes for one node."""

    candidates: list[Candidate]
    weight_set: int


class DraftReference:
    """Computes the nodes of the last draft of a drafter's only sequence in a tree or a path."""

    def __init__(self, drafter: SuffixDrafter, own: Sequence[int], *, cost: float) -> None:
        self.drafter, self.own = drafter, list(own)
        self.nodes = drafter._sequences.tables.nodes[0]
        self.state = drafter._sequences.state[0]
        self.evidence = drafter._frame.arrays.evidence
        self.learned = drafter.corpus.learned
        self.threshold = np.float32(cost * speedup_of(drafter.budget))
        self.is_tree = drafter.config.draft_shape == "tree"
        self.second = OF_SHORTER
        """What the corpus's second level is at the current node."""

    def node(self, index: int, path: Sequence[int], path_prob: float, tokens: Sequence[int]) -> NodeReference:
        """Compute the candidates of a node and their probabilities.

        tokens: the candidates that were found, in this order. Raises AssertionError if they are not among the best.
        """
        node = self.nodes[index]
        text = [*self.own, *path]
        self.second = int(self.evidence.second[node[EVIDENCE + GLOBAL]])
        levels = {
            (source, level): self._level(node, source, level, path)
            for source in (GLOBAL, LOCAL)
            for level in range(LEVELS)
        }
        self._assert_searched(node, levels, len(path), path_prob)
        is_end = any(2 * level.count(SEPARATOR) > len(level.following) for level in levels.values())
        predicted = {source: self._predicted(node, source, path) for source in (GLOBAL, LOCAL)}
        candidates = self._candidates(levels, predicted)
        least = MIN_SCORE * self.threshold / path_prob
        found = [each for each in candidates if each.score >= least and not is_end]
        by_token = {each.token: each for each in found}
        kept = [by_token[token] for token in tokens]
        most = KEPT if self.is_tree else KEPT_FOR_PATH
        # Of more, any of those with the same score may be left out.
        assert len(found) > most or kept == found, "candidates are not in the order in which they were found"
        best = sorted((each.score for each in found), reverse=True)[:most]
        np.testing.assert_allclose(sorted((each.score for each in kept), reverse=True), best)
        return NodeReference(kept, self._estimate(kept, levels, predicted, node, text, len(path)))

    def _assert_searched(
        self, node: np.ndarray, levels: dict[tuple[int, int], Level], depth: int, path_prob: float
    ) -> None:
        """Check that a source without agreeing samples was searched again for the path, if that may pay."""
        for source in (GLOBAL, LOCAL):
            is_unmatched = not any(levels[source, level].following for level in range(LEVELS))
            if is_unmatched and path_prob >= EXPLORED * self.threshold:
                assert self.evidence.found_at[node[EVIDENCE + source]] == depth

    def _level(self, node: np.ndarray, source: int, level: int, path: Sequence[int]) -> Level:
        piece, evidence = int(node[EVIDENCE + source]), self.evidence
        found_at, sampled = int(evidence.found_at[piece]), int(evidence.counts[piece, level])
        ahead = len(path) - found_at
        samples = []
        for sample in range(sampled):
            run = self._read(source, int(evidence.addresses[piece, level, sample]), ahead + 1, path)
            if run[:ahead] == list(path[found_at:]):
                samples.append((int(evidence.ages[piece, level, sample]), sample, run[ahead]))
        age, _, newest = min(samples, default=(0, 0, SEPARATOR))
        total = len(samples)
        if evidence.totals[piece, level] > sampled:
            total = total * int(evidence.totals[piece, level]) // sampled
        following = [token for _, _, token in sorted(samples, key=lambda each: each[1])]
        return Level(following, newest, age, total, int(evidence.lengths[piece, level]) + ahead)

    def _read(self, source: int, address: int, size: int, path: Sequence[int]) -> list[int]:
        """Read tokens from an address; the path follows the request's own text."""
        if source == GLOBAL:
            return [int(token) for token in uint32_at(address, size)]
        position = (address - int(self.state[TEXT])) // 4
        return [*self.own, *path][position : position + size]

    def _predicted(self, node: np.ndarray, source: int, path: Sequence[int]) -> int:
        place = int(self.state[POINTERS + 3 * source])
        if place == NO_POINTER or node[MISSES + source] > DROPPED_MISSES or node[MISSES + source] == ABSENT:
            return SEPARATOR
        if source == LOCAL:
            return ([*self.own, *path])[place + len(path)]
        ring = self.drafter.corpus.state().ring
        return int(ring.read(place + len(path), place + len(path) + 1)[0])

    @staticmethod
    def _candidates(levels: dict[tuple[int, int], Level], predicted: dict[int, int]) -> list[Candidate]:
        found = [predicted[source] for source in (LOCAL, GLOBAL)]
        found += [
            token for source in (LOCAL, GLOBAL) for level in range(LEVELS) for token in levels[source, level].following
        ]
        tokens = [token for token in dict.fromkeys(found) if token != SEPARATOR][:CONSIDERED]
        return [
            Candidate(
                token,
                (token in predicted.values())
                + sum(level.count(token) / max(1, len(level.following)) for level in levels.values()),
            )
            for token in tokens
        ]

    def _estimate(
        self,
        kept: list[Candidate],
        levels: dict[tuple[int, int], Level],
        predicted: dict[int, int],
        node: np.ndarray,
        text: list[int],
        depth: int,
    ) -> int:
        """Write the candidates' inputs and probabilities; return the set of weights."""
        apart = SECOND if self.second != OF_SHORTER else None
        used = {
            place: level
            for place, level in levels.items()
            if level.total > (0 if place[1] == 0 or place == apart else levels[place[0], 0].total)
        }
        longest = {
            source: max((level.length for place, level in used.items() if place[0] == source), default=0)
            for source in (GLOBAL, LOCAL)
        }
        lengths = [int(bucket.py_func(SET_BUCKET, longest[source])) for source in (LOCAL, GLOBAL)]
        weight_set = lengths[0] * SET_LENGTHS + lengths[1] + (self.second * SETS if SECOND in used else 0)
        for candidate in kept:
            candidate.source = self._source_of(candidate.token, used, predicted)
            self._add_inputs(candidate, kept, used, predicted, node, text)
        for candidate in kept:
            total = self._sum(candidate, weight_set)
            matched = (longest[LOCAL] > 0) + 2 * (longest[GLOBAL] > 0)
            cell, part = final_cell.py_func(depth, matched, total)
            logits = self.learned.logits
            candidate.mixed = float(fast_sigmoid.py_func(np.float32(total)))
            candidate.final_cell = cell + (part >= 0.5)
            value = (1 - part) * logits[cell] + part * logits[cell + 1]
            candidate.prob = float(fast_sigmoid.py_func(np.float32(value)))
        return weight_set

    def _source_of(self, token: int, used: dict[tuple[int, int], Level], predicted: dict[int, int]) -> int:
        matches = [(level.length, place) for place, level in used.items() if level.count(token)]
        if not matches:
            return LOCAL if predicted[LOCAL] == token else GLOBAL
        _, place = max(matches, key=lambda each: each[0])
        return LIBRARY if place == SECOND and self.second == OF_LIBRARIES else place[0]

    def _add_inputs(
        self,
        candidate: Candidate,
        kept: list[Candidate],
        used: dict[tuple[int, int], Level],
        predicted: dict[int, int],
        node: np.ndarray,
        text: list[int],
    ) -> None:
        token, logits = candidate.token, self.learned.logits
        for (source, number), level in used.items():
            row = source * LEVELS + number
            is_apart = self.second != OF_SHORTER and (source, number) == SECOND
            first = np.int64(
                second_cells.py_func(self.second, level.length, level.total)
                if is_apart
                else match_cells.py_func(row, level.length, level.total)
            )
            cell = match_cell.py_func(first, level.count(token), len(level.following), level.newest == token)
            candidate.inputs[row] = int(cell), float(logits[cell])
        for source in (GLOBAL, LOCAL):
            if predicted[source] != SEPARATOR:
                run, misses = int(node[RUNS + source]), int(node[MISSES + source])
                cell = pointer_cell.py_func(source, run, misses, predicted[source] == token)
                candidate.inputs[4 + source] = int(cell), float(logits[cell])
            prob, is_blended = BLEND_PRIOR, False
            for number in (0, 1) if self.second != OF_SHORTER and source == GLOBAL else (1, 0):
                if (source, number) in used:
                    level, is_blended = used[source, number], True
                    different = max(1, sum(level.count(each.token) > 0 for each in kept))
                    prob = (level.count(token) + different * prob) / (len(level.following) + different)
            candidate.inputs[8 + source] = -1, float(fast_logit.py_func(np.float32(prob))) if is_blended else 0.0
        candidate.inputs[6] = int(token_cells.py_func(token)), np.nan
        candidate.inputs[7] = int(pair_cells.py_func(text[-1], token)), np.nan

    def _sum(self, candidate: Candidate, weight_set: int) -> float:
        """Return the weighted sum; the cells of the token and the pair are chosen by the sum of the inputs before."""
        weights = self.learned.weights[weight_set]
        total = sum(weights[index] * value for index, (_, value) in candidate.inputs.items() if index not in (6, 7))
        for index in (6, 7):
            cell = candidate.inputs[index][0] + token_share.py_func(float(fast_sigmoid.py_func(np.float32(total))))
            candidate.inputs[index] = cell, float(self.learned.logits[cell])
            total += weights[index] * candidate.inputs[index][1]
        return float(total)


def learn(
    nodes: Sequence[tuple[NodeReference, int]], cells: np.ndarray, logits: np.ndarray, weights: np.ndarray
) -> None:
    """Learn from pairs of a node and the token that the target produced after it; the arrays are written."""
    for node, token in nodes:
        for candidate in node.candidates:
            outcome = float(candidate.token == token)
            step = LEARNING_RATE * (outcome - candidate.mixed)
            for index, (cell, value) in candidate.inputs.items():
                weights[node.weight_set, index] += step * (value if cell < 0 else logits[cell])
                if cell >= 0:
                    _learn_cell(cells, logits, cell, outcome, TOKEN_SEEN_CAP if index in (6, 7) else SEEN_CAP)
            _learn_cell(cells, logits, candidate.final_cell, outcome, FINAL_SEEN_CAP)


def _learn_cell(cells: np.ndarray, logits: np.ndarray, cell: int, outcome: float, cap: float) -> None:
    seen = cells[cell, SEEN] + 1
    cells[cell, MEAN] += (outcome - cells[cell, MEAN]) / seen
    cells[cell, SEEN] = min(seen, cap)
    mean = min(max(cells[cell, MEAN], 0.001), 0.999)
    logits[cell] = np.log(mean / (1 - mean))
