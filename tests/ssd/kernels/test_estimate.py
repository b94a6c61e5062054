"""Candidates, probabilities, growth and learning of whole drafts, compared with a slow reference."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.kernels.probabilities import FALLBACK_CELLS, FINAL, MEAN, MIXED, SECOND_CELLS, SEEN, TABLE_INPUTS
from ssd.sequences.tables import CANDIDATES, CELLS, DEPTH, NOT_ESTIMATED, SOURCE, WEIGHT_SET
from tests.replay import branches, drafter_of, progress_of
from tests.ssd.kernels.reference import DraftReference, learn
from tests.strategies import ALPHABETS, array, examples

MAX_DRAFT = 12
COSTS = st.sampled_from([0.001, 0.02, 0.1, 0.3])


def worlds():
    """Generate requests, the prompts of two running ones, the output of the second, and the requests of a library."""

    def over(alphabet):
        tokens = st.sampled_from(alphabet)
        runs = lambda size: st.lists(tokens, max_size=size)  # noqa: E731
        repeated = st.lists(tokens, min_size=1, max_size=4).map(lambda phrase: phrase * 6)
        requests = st.lists(runs(30), max_size=5)
        return requests.flatmap(
            lambda requests: st.tuples(
                st.just(requests),
                st.tuples(runs(20), st.one_of(repeated, *(st.just(each[:20]) for each in requests))).map(
                    lambda parts: parts[0] + parts[1]
                ),
                runs(30),
                runs(10),
                st.one_of(st.just([]), st.lists(runs(30), max_size=3)),
            )
        )

    return ALPHABETS.flatmap(over)


def randomize(learned, seed):
    """Fill the learned tables, apart from those of fallback candidates, so that each input matters."""
    rng = np.random.default_rng(seed)
    cells = _estimated_cells(len(learned.cells))
    learned.cells[cells, MEAN] = rng.uniform(0.02, 0.98, len(cells))
    means = learned.cells[cells, MEAN].astype(np.float64)
    learned.logits[cells] = np.log(means / (1 - means))
    # Around the limits of the number of outcomes.
    learned.cells[cells, SEEN] = rng.choice([0.5, 59.5, 249.5, 499.5], len(cells))
    learned.weights[:] = rng.uniform(0, 0.5, learned.weights.shape)


def _estimated_cells(count):
    """Return all cells of the tables but those of fallback candidates."""
    return np.append(np.arange(FALLBACK_CELLS), np.arange(SECOND_CELLS, count))


def drafter_in(world, seed=None, **settings):
    """Return a drafter with two running sequences; the output of sequence 2 is in the live tier."""
    requests, prompt, other_prompt, produced, library = world
    drafter = drafter_of(requests, max_draft=MAX_DRAFT, **settings)
    if library:
        drafter.corpus.read_from(drafter_of(library, match_depth=drafter.config.match_depth).corpus)
    if seed is not None:
        randomize(drafter.corpus.learned, seed)
    drafter.start(1, array(prompt))
    # Its own tokens must not become fallback candidates.
    drafter.start(2, array(other_prompt))
    drafter.draft(progress_of({2: produced}, limit=0))
    drafter.corpus.refresh()
    return drafter


@given(worlds(), st.sampled_from(["path", "tree"]), COSTS, st.integers(0, MAX_DRAFT + 3), st.integers(0, 1000))
@examples(200)
def test_drafts_and_what_is_learned_are_those_of_a_slow_reference(world, shape, cost, limit, seed):
    prompt = world[1]
    with drafter_in(world, seed, draft_shape=shape) as drafter:
        drafts = drafter.draft(progress_of({1: []}, limit, cost=cost))
        if not prompt or not limit:
            assert len(drafts.tokens) == 0
            return
        reference = DraftReference(drafter, prompt, cost=cost)
        # The hashes of pairs are computed modulo 2**64.
        with np.errstate(over="ignore"):
            nodes = assert_estimates_match(drafter, reference, drafts)
        assert_best_candidates_are_drafted(drafter, reference, drafts, limit)
        assert_learning_matches(drafter, nodes, drafts, seed)


def assert_estimates_match(drafter, reference, drafts):
    """Check all nodes; return the reference of each, None for a last one that is not estimated, by its path."""
    _, nodes, probs, candidates, estimates = (table[0] for table in drafter._sequences.tables)
    found = {}
    for index, path in enumerate([[], *branches(drafts.tokens.tolist(), drafts.parents.tolist())]):
        node = nodes[index]
        assert node[DEPTH] == len(path)
        if node[CANDIDATES] == NOT_ESTIMATED:
            assert index == len(drafts.tokens)
            found[tuple(path)] = None
            continue
        if path:
            parent = found[tuple(path[:-1])]
            sources = {each.token: each.source for each in parent.candidates}
            assert node[SOURCE] == sources[path[-1]]
        rows, values = candidates[index, : node[CANDIDATES]], estimates[index, : node[CANDIDATES]]
        expected = reference.node(index, path, probs[index, 1], rows[:, 0].astype(np.uint32).tolist())
        found[tuple(path)] = expected
        assert len(rows) == 0 or node[WEIGHT_SET] == expected.weight_set
        for row, value, candidate in zip(rows, values, expected.candidates, strict=True):
            cells = {at: cell for at, (cell, _) in candidate.inputs.items() if at < TABLE_INPUTS}
            assert {at: int(row[CELLS + at]) for at in range(TABLE_INPUTS) if row[CELLS + at] >= 0} == cells
            assert value[MIXED] == pytest.approx(candidate.mixed, abs=0.004)
            assert value[FINAL] == pytest.approx(candidate.prob, abs=0.01)
            assert int(row[CELLS + TABLE_INPUTS]) == candidate.final_cell
    return found


def assert_best_candidates_are_drafted(drafter, reference, drafts, limit):
    """Check that the candidate with the largest path probability is added until none reaches the threshold."""
    _, nodes, probs, candidates, estimates = (table[0] for table in drafter._sequences.tables)
    waiting, added = [], list(zip(drafts.parents.tolist(), drafts.tokens.tolist(), strict=True))
    for index in range(len(added) + 1):
        if nodes[index, CANDIDATES] == NOT_ESTIMATED:
            assert index == len(added) == min(limit, MAX_DRAFT)
            return
        finals = estimates[index, : nodes[index, CANDIDATES], FINAL]
        total = np.float32(0)
        for final in finals:
            total += final
        if not reference.is_tree:
            waiting = []
        for token, final in zip(candidates[index, :, 0].astype(np.uint32).tolist(), finals, strict=False):
            path_prob = probs[index, 1] * (final / max(np.float32(1), total))
            if path_prob >= reference.threshold:
                waiting.append((path_prob, index - 1, token))
        if index == len(added):
            assert not waiting
            return
        best = max(waiting, key=lambda each: each[0])
        assert (best[1], best[2]) == added[index]
        assert probs[index + 1, 1] == best[0]
        waiting.remove(best)


def assert_learning_matches(drafter, nodes, drafts, seed):
    """Commit a path of the draft and another token, and compare the learned tables."""
    learned, rng = drafter.corpus.learned, np.random.default_rng(seed)
    cells, logits, weights = (array.astype(np.float64) for array in learned[:3])
    paths = list(nodes)
    path = list(paths[rng.integers(len(paths))])
    last = nodes[tuple(path)]
    tokens = path + [each.token for each in (last.candidates if last else [])][:1] + [99] * int(rng.integers(2))
    if not tokens:
        return
    visited = []
    for depth, token in enumerate(tokens):
        node = nodes.get(tuple(tokens[:depth]))
        if node is None:
            break
        visited.append((node, token))
    drafter.draft(progress_of({1: tokens}, limit=0, verified=len(drafts.tokens)))
    learn(visited, cells, logits, weights)
    at = _estimated_cells(len(cells))
    np.testing.assert_allclose(learned.cells[at], cells[at], atol=1e-3)
    np.testing.assert_allclose(learned.logits[at], logits[at], atol=0.07)  # Logits are interpolated.
    np.testing.assert_allclose(learned.weights, weights, atol=1e-3)
