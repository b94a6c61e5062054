"""The arrays of a step's results equal those that a loop over its sequences and draft tokens counts.

Draft tokens that continue a prediction are those that a search for strings finds.
"""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.drafts import Drafts
from engine.scheduling.draft_usage import PREDICTED_AFTER, is_predicted
from engine.scheduling.request import Request
from engine.scheduling.result import ResultArrays, StepResult
from engine.scheduling.sequence import Sequence
from engine.scheduling.table import RequestTable
from tests.engine.steps import plan_of_rows
from tests.engine.trees import batch_of_trees, random_tree
from tests.replay import branches
from tests.strategies import array

WIDTH = 7
"""Longest output of a step, with drafts of up to six tokens."""


def results_of(seed):
    """Return random results of paths, or of paths and trees, and the table that they refer to."""
    rng = np.random.default_rng(seed)
    table = RequestTable(8, 4)
    for sequence_id in rng.permutation(90)[: rng.integers(1, 9)].tolist():
        table.add(Sequence(sequence_id, Request(np.ones(3, np.uint32)), 99))
    used = [sequence for sequence in table.sequences if sequence is not None]
    plan = plan_of_rows(table, [used[at] for at in rng.permutation(len(used))[: rng.integers(0, len(used) + 1)]])
    has_trees = rng.random() < 0.5
    trees = [random_tree(rng, [], WIDTH - 1, 9) for _ in plan.producing]
    batch = batch_of_trees(
        [(tokens, parents if has_trees else range(-1, len(tokens) - 1)) for tokens, parents in trees]
    )
    batch.source[:] = rng.integers(1, 9, len(batch.tokens))
    plan.drafts, values = Drafts(batch), np.zeros((plan.producers, 2 + WIDTH), np.int32)
    paths = np.zeros((plan.producers, WIDTH), np.int64) if has_trees else None
    for index, line in enumerate(values):
        parents, path = batch.parents_of(index)[: rng.integers(0, len(batch.tokens_of(index)) + 1)], []
        while len(found := np.flatnonzero(parents == (path[-1] if path else -1))) and rng.random() < 0.8:
            path.append(int(rng.choice(found)))
        line[:2] = 1 + len(path), len(parents)
        line[2:] = rng.integers(1, 99, WIDTH)
        if has_trees:
            paths[index, : len(path)] = path
    result = StepResult(plan, values, paths)
    # Some sequences had ended before, and some outputs end within the step's tokens.
    for index, length in enumerate(rng.integers(0, values[:, 0] + 1).tolist()):
        result.add(index, length)
    return result, table


def naive_arrays(result):
    batch, columns, sources = result.plan.drafts.batch, [], ([], [])
    tokens = []
    for index, sequence in enumerate(result.plan.producing):
        length, (produced, verified) = int(result.lengths[index]), result.values[index, :2].tolist()
        if not length:
            continue
        depths = [0]
        for parent in batch.parents_of(index)[:verified].tolist():
            depths.append(1 + depths[1 + parent])
        accepted = min(length, produced - 1)
        path = range(accepted) if result.paths is None else result.paths[index, :accepted].tolist()
        own = batch.source[batch.offsets[index] :]
        columns.append((sequence.sequence_id, length, accepted, max(depths)))
        tokens += result.values[index, 2 : 2 + length].tolist()
        sources[0].extend(own[:verified].tolist())
        sources[1].extend(own[node] for node in path)
    ids, lengths, accepted, depths = np.array(columns, np.int64).reshape(-1, 4).T
    return ResultArrays(
        ids, lengths, np.array(tokens, np.uint32), accepted, depths, *(np.array(each, np.uint8) for each in sources), {}
    )


@pytest.mark.parametrize("seed", range(80))
def test_arrays_equal_those_of_a_loop(seed):
    result, table = results_of(seed)
    expected = naive_arrays(result)
    assert result.counts[:3] == (len(expected.ids), len(expected.tokens), expected.accepted.sum())
    for sequence in [each for each in table.sequences if each is not None]:
        table.remove(sequence)  # Results stay as they were.
    for name, found, wanted in zip(ResultArrays._fields, result.arrays, expected, strict=True):
        assert np.array_equal(found, wanted) if name != "logprobs" else found == wanted == {}, name
        assert name == "logprobs" or found.dtype == wanted.dtype
    # In each draft, the sources of accepted tokens come first, as they are counted when the step is committed.
    bounds, kept = (
        result.plan.drafts.batch.offsets,
        [result.path_of(index).tolist() for index in range(len(result.ids))],
    )
    for index, (first, end) in enumerate(pairwise(bounds.tolist())):
        rest = [node for node in range(end - first) if node not in kept[index]]
        wanted = result.plan.drafts.batch.source[first:end][np.array(kept[index] + rest, int)]
        assert result.sources[first:end].tolist() == wanted.tolist()
    each = list(result.arrays.each())
    assert [(number, len(tokens), accepted) for number, tokens, accepted in each] == list(
        zip(expected.ids.tolist(), expected.lengths.tolist(), expected.accepted.tolist(), strict=True)
    )


@pytest.mark.parametrize("seed", range(40))
def test_results_of_other_drafts_leave_the_others_as_they_are(seed):
    result, _ = results_of(seed)
    rng, count = np.random.default_rng(seed), result.plan.producers
    at = np.flatnonzero(rng.random(count) < 0.5)
    right = [result.tokens_of(index).tolist() for index in at.tolist()]
    others = Drafts(batch_of_trees([random_tree(rng, own, WIDTH, 99) for own in right]))
    found = result.with_drafts(result.plan.drafts.replaced(at, others), at)
    for index in range(count):
        assert found.tokens_of(index).tolist() == result.tokens_of(index).tolist()
        path, draft = found.path_of(index), found.plan.drafts.batch.tokens[found.draft_of(index)]
        if index not in at:
            assert path.tolist() == result.path_of(index).tolist()
            assert draft.tolist() == result.plan.drafts.batch.tokens[result.draft_of(index)].tolist()
        else:
            assert draft[path].tolist() == result.tokens_of(index)[: len(path)].tolist()
            assert found.accepted[index] == len(path)


letters = st.lists(st.integers(0, 2), max_size=14)


def continues(prediction, output, path):
    """Return whether a path of draft tokens continues the prediction after the output."""
    if len(output) < PREDICTED_AFTER:
        return prediction[: len(output) + len(path)] == output + path
    wanted = output[-PREDICTED_AFTER:] + path
    return any(prediction[at : at + len(wanted)] == wanted for at in range(len(prediction)))


@given(letters, letters, st.lists(st.integers(0, 2), max_size=6), st.data())
def test_draft_tokens_continue_a_prediction_if_their_path_does(prediction, output, draft, data):
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(draft))]
    found = is_predicted(array(prediction), array(output), array(draft), np.array(parents, np.int32))
    assert found.tolist() == [continues(prediction, output, path) for path in branches(draft, parents)]
