"""Trees as context and draft merged, against the plain backend's mask over everything."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.attention import merge
from engine.attention.layout import cut
from engine.attention.merge import Partial, among_drafts, padded
from engine.attention.plain import PlainAttention
from engine.executor.batch import build_batch
from engine.models.config import ModelConfig
from engine.speculation.draft_tree import DraftTree
from tests.engine.flashinfer_twin import attention
from tests.engine.forward import PAGE_SIZE, sequence_of
from tests.engine.trees import random_tree

HEAD_DIM = 16


def check_trees(seed, contexts, sharing, most):
    """Random trees behind some contexts, `sharing` query heads to each of two key heads."""
    rng, generator = np.random.default_rng(seed), torch.Generator().manual_seed(seed)
    config = ModelConfig(
        9, 8, 8, num_layers=1, num_heads=2 * sharing, num_kv_heads=2, head_dim=HEAD_DIM, max_positions=512
    )
    plain = PlainAttention(config, 64, PAGE_SIZE, torch.float32, "cpu")

    def random_heads(count):
        heads = torch.randn(count, 2 * sharing + 4, HEAD_DIM, generator=generator)
        return heads.split((2 * sharing, 2, 2), dim=1)

    tables = np.split(rng.permutation(64), len(contexts))
    earlier, sequences = [], []
    for index, context in enumerate(contexts):
        pages = tables[index].tolist()
        earlier.append(random_heads(context))
        if context:
            prompt = build_batch([sequence_of(np.zeros(context), pages)], PAGE_SIZE)
            plain.begin(prompt)(0, *earlier[-1])
        draft, parents = random_tree(rng, rng.integers(0, 9, most), most, 9)
        sequence = sequence_of(np.zeros(context + 1), pages, computed=context, draft=draft)
        sequence.tree = DraftTree(np.array(parents, np.int32)) if parents else None
        sequences.append(sequence)
    batch = build_batch(sequences, PAGE_SIZE)
    query, key, value = random_heads(len(batch.tokens))
    expected = plain.begin(batch)(0, query, key, value)

    pieces = cut(batch)
    contexts_part = [
        attention(rows, keys, values, torch.ones(len(rows), len(keys), dtype=torch.bool))
        for rows, (_, keys, values) in zip(query.split([piece.length for piece in pieces]), earlier, strict=True)
    ]
    context = Partial(*(torch.cat(parts) for parts in zip(*contexts_part, strict=True)))
    drafts = among_drafts(query, key, value, padded(pieces, "cpu"))
    got = merge.merge(context, drafts)
    torch.testing.assert_close(got.attended, expected, rtol=2e-5, atol=2e-5)
    # The other way round it is the same, and nothing is lost by merging with nothing.
    torch.testing.assert_close(merge.merge(drafts, context), got)
    nothing = Partial(torch.zeros_like(query), torch.full(query.shape[:2], -math.inf))
    torch.testing.assert_close(merge.merge(got, nothing), got)


TREES = (
    st.integers(0, 10_000),
    st.sampled_from([(0,), (1,), (200,), (0, 30), (5, 130, 0, 64)]),
    st.sampled_from([1, 2, 3]),
    st.sampled_from([1, 7, 40]),
)


@settings(max_examples=60)
@given(*TREES)
def test_merged_attention_of_trees_is_that_with_a_mask_over_everything(seed, contexts, sharing, most):
    check_trees(seed, contexts, sharing, most)


def natural(left, right):
    """As if weights were natural logarithms."""
    shares = torch.softmax(torch.stack((left.weight, right.weight)), 0)[..., None]
    return Partial(left.attended * shares[0] + right.attended * shares[1], left.weight)


@pytest.mark.parametrize("fault", ["natural logarithms", "siblings seen", "heads of other keys"])
def test_faults_are_noticed(monkeypatch, fault):
    if fault == "natural logarithms":
        monkeypatch.setattr(merge, "merge", natural)
    elif fault == "siblings seen":
        monkeypatch.setattr(merge, "among_themselves", lambda piece: np.tri(piece.length, dtype=bool))
    else:
        monkeypatch.setitem(
            among_drafts.__globals__, "torch", type("Torch", (), {**vars(torch), "einsum": staticmethod(swapped)})
        )
    with pytest.raises(AssertionError):
        check_trees(1, (5, 130, 0, 64), 2, 40)


def swapped(equation, left, right):
    """An einsum that takes the other key head."""
    return torch.einsum(equation, left, right.flip(2))


def test_large_scores_overflow_nothing():
    left = Partial(torch.ones(1, 1, 2), torch.tensor([[4000.0]]))
    right = Partial(torch.zeros(1, 1, 2), torch.tensor([[3999.0]]))
    merged = merge.merge(left, right)
    assert merged.attended.flatten().tolist() == pytest.approx([2 / 3, 2 / 3])
    assert merged.weight.item() == pytest.approx(4000 + math.log2(1.5))
