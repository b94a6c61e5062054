"""A step of a batch: drafts depend on the text only, and a refused step changes nothing."""

import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.types import Progress
from tests.replay import accepted_path, drafter_of, progress_of
from tests.strategies import ALPHABETS, array, examples

SHAPES = st.sampled_from(["path", "tree"])


def batches():
    """Generate requests, and prompts of sequences with their outputs, over one alphabet."""

    def over(alphabet):
        runs = st.lists(st.sampled_from(alphabet), max_size=30)
        return st.tuples(st.lists(runs, max_size=5), st.lists(st.tuples(runs, runs), min_size=1, max_size=5))

    return ALPHABETS.flatmap(over)


def contents(drafts):
    """Return each sequence's draft as lists."""
    bounds = list(zip(drafts.offsets.tolist(), drafts.offsets.tolist()[1:], strict=False))
    return [
        tuple(array[begin:end].tolist() for array in (drafts.tokens, drafts.parents, drafts.accept_prob, drafts.source))
        for begin, end in bounds
    ]


@given(batches(), SHAPES, st.randoms(use_true_random=False))
@examples(60)
def test_a_draft_does_not_depend_on_the_rest_of_the_batch(world, shape, random):
    requests, sequences = world
    with drafter_of(requests, draft_shape=shape, cost=0.02) as drafter:
        for sequence_id, (prompt, _) in enumerate(sequences):
            drafter.start(sequence_id, array(prompt))
        drafter.corpus.refresh()
        committed = {sequence_id: produced for sequence_id, (_, produced) in enumerate(sequences)}
        drafter.draft(progress_of(committed, limit=0))
        alone = [contents(drafter.draft(progress_of({sequence_id: []}, limit=8)))[0] for sequence_id in committed]
        order = random.sample(list(committed), len(committed))
        together = contents(drafter.draft(progress_of(dict.fromkeys(order, ()), limit=8)))
        assert together == [alone[sequence_id] for sequence_id in order]


@given(batches(), SHAPES)
@examples(60)
def test_tokens_committed_in_many_steps_have_the_same_probabilities_as_a_prompt(world, shape):
    requests, sequences = world
    with drafter_of(requests, draft_shape=shape) as by_steps, drafter_of(requests, draft_shape=shape) as at_once:
        for sequence_id, (prompt, produced) in enumerate(sequences):
            by_steps.start(sequence_id, array(prompt))
            for token in produced:
                by_steps.draft(progress_of({sequence_id: [token]}, limit=0))
            at_once.start(sequence_id, array([*prompt, *produced]))
        # Candidates of equal probability are ordered as they are found, so their tokens may differ.
        everyone = progress_of(dict.fromkeys(range(len(sequences)), ()), limit=1)
        one, other = (contents(drafter.draft(everyone)) for drafter in (by_steps, at_once))
        assert [probs for _, _, probs, _ in one] == [probs for _, _, probs, _ in other]


def test_room_is_made_for_a_step_that_commits_many_tokens():
    # Each token is so rare that all of its occurrences are sampled, for any order of equal keys.
    texts = [np.random.default_rng(seed).integers(0, 500, 5000).astype(np.uint32) for seed in range(3)]
    with drafter_of(cost=0.001) as drafter, drafter_of(cost=0.001) as another:
        for sequence_id, text in enumerate(texts):
            drafter.start(sequence_id, text[:10])
            another.start(sequence_id, text)
        drafter.draft(progress_of({0: texts[0][10:], 1: texts[1][10:2000], 2: texts[2][10:11]}, limit=0))
        drafter.draft(progress_of({2: texts[2][11:], 0: [], 1: texts[1][2000:]}, limit=0))
        everyone = progress_of({0: [], 1: [], 2: []}, limit=8)
        drafts = contents(drafter.draft(everyone))
        assert drafts == contents(another.draft(everyone))
        assert all(tokens for tokens, *_ in drafts)


def replayed(shape):
    """Return all drafts of a few requests that run two at a time, and the counters."""
    rng = np.random.default_rng(3)
    phrases = rng.integers(0, 30, (8, 6))
    texts = [phrases[rng.integers(0, 8, 10)].ravel() for _ in range(12)]
    seen = []
    with drafter_of(draft_shape=shape) as drafter:
        for first in range(0, len(texts), 2):
            done = {}
            for sequence_id in (first, first + 1):
                drafter.start(sequence_id, texts[sequence_id][:10].astype(np.uint32))
                done[sequence_id] = 10
            outcome = {sequence_id: ([], 0) for sequence_id in done}
            for _ in range(12):
                runs = [np.array(tokens, np.uint32) for tokens, _ in outcome.values()]
                drafts = drafter.draft(
                    Progress(
                        np.array(list(outcome), np.uint64),
                        np.concatenate(runs),
                        np.cumsum([0, *map(len, runs)]).astype(np.uint32),
                        np.array([verified for _, verified in outcome.values()], np.uint32),
                        np.full(2, 6, np.uint32),
                    )
                )
                seen += contents(drafts)
                drafter.corpus.refresh()
                for index, sequence_id in enumerate(list(outcome)):
                    left = texts[sequence_id][done[sequence_id] :]
                    accepted = len(accepted_path(drafts, index, left))
                    tokens = left[: accepted + 1]
                    done[sequence_id] += len(tokens)
                    outcome[sequence_id] = (tokens, len(drafts.tokens_of(index)))
            for sequence_id, (tokens, verified) in outcome.items():
                drafter.finish(sequence_id, tokens.astype(np.uint32), verified=verified)
            drafter.corpus.refresh()
        return seen, [counter.tolist() for counter in drafter.stats.counters]


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_the_same_requests_in_the_same_order_give_the_same_drafts(shape):
    drafts, counters = replayed(shape)
    assert (drafts, counters) == replayed(shape)
    steps, committed, _ = counters[0]
    assert committed / steps > 1.5


def test_a_kept_error_does_not_block_the_maintainer():
    """The view that a refused step read is released although the error holds the frames."""
    with drafter_of() as drafter:
        drafter.start(1, array([1]))
        with pytest.raises(ValueError, match="offered 0 tokens") as error:
            drafter.draft(progress_of({1: [2]}, limit=4, verified=1))

        def learn():
            for _ in range(3):
                drafter.corpus.append(array([1, 2, 3]))
                drafter.corpus.refresh()

        learning = threading.Thread(target=learn, daemon=True)
        learning.start()
        learning.join(30)
        is_stuck = learning.is_alive()
        assert error.value.__traceback__ is not None
        assert not is_stuck
