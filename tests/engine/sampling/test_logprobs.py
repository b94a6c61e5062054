"""Compare log-probabilities with loops."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.logprobs import compute_logprobs, join_logprobs
from tests.engine import naive_sampling as naive


@given(st.integers(1, 6), st.integers(2, 30), st.integers(0, 40), st.integers(0, 1000))
def test_logprobs_equal_the_log_softmax(rows, size, count, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, size)).astype(np.float32)
    tokens = rng.integers(0, size, rows).astype(np.uint32)
    found = compute_logprobs(torch.from_numpy(logits), tokens, count)
    for row, token in enumerate(tokens.tolist()):
        expected = naive.log_softmax(logits[row].tolist())
        ranking = sorted(range(size), key=lambda other: -expected[other])
        assert abs(found.tokens[row] - expected[token]) < 1e-4
        assert found.top_ids[row].tolist() == ranking[:count]
        np.testing.assert_allclose(found.top[row], [expected[other] for other in ranking[:count]], atol=1e-4)


def test_joined_parts_equal_the_whole():
    logits, tokens = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), np.arange(5, dtype=np.uint32)
    whole = compute_logprobs(logits, tokens, 3)
    again = join_logprobs([whole.part(0, 2, 3), whole.part(2, 2), whole.part(2, 5, 3)], 3)
    for name in ("tokens", "top_ids", "top"):
        assert np.array_equal(getattr(again, name), getattr(whole, name))
    assert join_logprobs([], 2).top.shape == (0, 2)
