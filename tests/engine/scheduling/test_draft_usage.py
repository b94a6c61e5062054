"""Which draft tokens continue a prediction, compared with a search for strings."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling.draft_usage import PREDICTED_AFTER, is_predicted
from tests.strategies import array

letters = st.lists(st.integers(0, 2), max_size=14)


def naive(prediction, output, path):
    """Return whether a path of draft tokens continues the prediction after the output."""
    if len(output) < PREDICTED_AFTER:
        return prediction[: len(output) + len(path)] == output + path
    wanted = output[-PREDICTED_AFTER:] + path
    return any(prediction[at : at + len(wanted)] == wanted for at in range(len(prediction)))


@given(letters, letters, st.lists(st.integers(0, 2), max_size=6), st.data())
def test_draft_tokens_continue_a_prediction_if_their_path_does(prediction, output, draft, data):
    parents = [data.draw(st.integers(-1, node - 1)) for node in range(len(draft))]
    paths = []
    for node, parent in enumerate(parents):
        paths.append([*(paths[parent] if parent >= 0 else []), draft[node]])
    found = is_predicted(array(prediction), array(output), array(draft), np.array(parents, np.int32))
    assert found.tolist() == [naive(prediction, output, path) for path in paths]
