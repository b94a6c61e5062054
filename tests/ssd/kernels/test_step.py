"""A step of a batch: drafts depend on the text only, and a refused step changes nothing."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tests.replay import drafter_of, progress_of
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
