"""The kernel that samples draft tokens on the CPU against the PyTorch implementation for all devices."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.candidates import NONE, choose_tokens
from engine.sampling.draft_sampler import CONSIDERED, DraftSampler
from engine.sampling.noise import gumbel_noise
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence


@st.composite
def batches(draw):
    """Sequences, logits after drafts of them, the sequence of each row, and the length of the drafts."""
    temperatures = draw(st.lists(st.sampled_from([0.0, 1e-9, 0.3, 1.0]), min_size=1, max_size=3))
    sequences = []
    for temperature in temperatures:
        sampling = SamplingParams(temperature=temperature, seed=draw(st.integers(-(2**63), 2**63 - 1)))
        prompt = np.ones(draw(st.integers(1, 40)), np.uint32)
        sequences.append(Sequence(len(sequences), Request(prompt, sampling), 100))
    owner = sorted(draw(st.lists(st.integers(0, len(sequences) - 1), min_size=1, max_size=4)))
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    logits = rng.normal(0, 4, (len(owner), draw(st.sampled_from([1, 3, 256, 257, 700])))).astype(np.float32)
    logits[rng.random(logits.shape) < draw(st.sampled_from([0.0, 0.7, 1.0]))] = -np.inf
    return sequences, torch.from_numpy(logits), np.array(owner), draw(st.integers(0, 5))


@given(batches(), st.integers(1, 4))
def test_kernel_samples_like_pytorch(batch, count):
    sequences, logits, owner, depth = batch
    sampler = DraftSampler(sequences)
    found = sampler.sample(logits, owner, depth, count)
    lengths = np.array([len(sequence) for sequence in sequences])
    expected = sampler._sample_on_device(logits, owner, lengths[owner] + depth, count)
    assert found.tokens.tolist() == expected.tokens.tolist()
    exists = found.tokens != NONE
    np.testing.assert_allclose(found.scores[exists], expected.scores[exists], rtol=1e-4, atol=1e-7)
    assert found.q is None
    assert not found.has_q.any()


@pytest.mark.parametrize("likelier", [0, 1, CONSIDERED - 1, CONSIDERED, CONSIDERED + 50])
def test_ties_with_the_last_considered_token(likelier):
    """Among equally likely tokens, the first ones are considered."""
    logits = torch.zeros(1, CONSIDERED + 100)
    logits[0, 100 : 100 + likelier] = 1.0
    considered = [*range(100, 100 + likelier), *range(100), *range(100 + likelier, logits.shape[1])][:CONSIDERED]
    noisy = (logits + gumbel_noise(torch.tensor([3]), torch.tensor([5]), logits.shape[1]))[0, considered]
    expected = [considered[index] for index in noisy.topk(4).indices.tolist()]
    keys = np.array([3]), np.array([5])
    tokens, _ = choose_tokens(logits, np.ones(1, np.float32), *keys, 4, CONSIDERED)
    assert tokens[0].tolist() == expected
