"""Properties of whole drafts: shape, threshold, limits; tests.ssd.kernels.test_estimate compares each node."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.types import ROOT, Source
from tests import naive
from tests.curves import speedup_of
from tests.replay import drafter_of, progress_of
from tests.ssd.kernels.test_estimate import drafter_in, worlds
from tests.strategies import examples

MAX_DRAFT = 12
CLEARLY = 2.0
"""Multiple of the threshold from which a node's path probability is clearly above it."""
SHAPES = st.sampled_from(["path", "tree"])
COSTS = st.sampled_from([0.001, 0.005, 0.02, 0.1, 0.3])


def path_probs_of(drafts):
    """Return the path probability of each node."""
    path_probs = []
    for parent, prob in zip(drafts.parents.tolist(), drafts.accept_prob.tolist(), strict=True):
        path_probs.append(prob * (path_probs[parent] if parent != ROOT else 1.0))
    return path_probs


def assert_is_a_tree(drafts):
    siblings = list(zip(drafts.parents.tolist(), drafts.tokens.tolist(), strict=True))
    assert len({*siblings}) == len(siblings)
    for node, parent in enumerate(drafts.parents.tolist()):
        assert ROOT <= parent < node
    for parent in {*drafts.parents.tolist()}:
        # At most one of the siblings is accepted.
        assert drafts.accept_prob[drafts.parents == parent].sum() <= 1 + 1e-4
    assert ((drafts.accept_prob > 0) & (drafts.accept_prob <= 1)).all()
    assert naive.SEPARATOR not in drafts.tokens.tolist()
    assert {*drafts.source.tolist()} <= {*Source}


@given(worlds(), SHAPES, COSTS, st.integers(0, MAX_DRAFT + 3))
@examples(150)
def test_a_draft_is_a_tree_whose_nodes_all_pay(world, shape, cost, limit):
    with drafter_in(world, draft_shape=shape) as drafter:
        drafts = drafter.draft(progress_of({1: []}, limit, cost=cost))
        assert len(drafts.tokens) <= min(limit, MAX_DRAFT)
        assert_is_a_tree(drafts)
        if shape == "path":
            assert drafts.parents.tolist() == list(range(ROOT, len(drafts.tokens) - 1))
        path_probs = path_probs_of(drafts)
        assert all(prob >= cost * speedup_of(drafter.budget) * (1 - 1e-4) for prob in path_probs)
        # Nodes are added in descending order of path probability.
        assert all(later <= earlier * (1 + 1e-4) for earlier, later in itertools.pairwise(path_probs))


def nodes_of(drafts):
    return list(zip(drafts.tokens.tolist(), drafts.parents.tolist(), drafts.accept_prob.tolist(), strict=True))


@given(worlds(), SHAPES, COSTS, st.integers(1, MAX_DRAFT))
@examples(80)
def test_a_lower_limit_only_cuts_the_end_of_a_draft(world, shape, cost, limit):
    with drafter_in(world, draft_shape=shape) as drafter:
        short, long = (drafter.draft(progress_of({1: []}, most, cost=cost)) for most in (limit, MAX_DRAFT))
        assert nodes_of(short) == nodes_of(long)[:limit]


@given(worlds(), SHAPES)
@examples(80)
def test_nodes_that_clearly_pay_do_not_depend_on_the_price(world, shape):
    with drafter_in(world, draft_shape=shape) as drafter:
        cheap = drafter.draft(progress_of({1: []}, MAX_DRAFT, cost=0.001))
        for cost in (0.01, 0.05, 0.3):
            expensive = drafter.draft(progress_of({1: []}, MAX_DRAFT, cost=cost))
            # Nodes near the threshold are not searched for again, so their children may differ.
            clear = sum(prob > CLEARLY * cost * speedup_of(drafter.budget) for prob in path_probs_of(cheap))
            assert nodes_of(expensive)[:clear] == nodes_of(cheap)[:clear]


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_drafts_shrink_as_tokens_cost_more(shape):
    rng = np.random.default_rng(0)
    phrases = rng.integers(0, 100, (12, 6))
    texts = [phrases[rng.integers(0, 12, 12)].ravel() for _ in range(60)]
    costs = (0.002, 0.01, 0.05, 0.2, 0.6)
    sizes = np.zeros(len(costs))
    with drafter_of(texts[:30], draft_shape=shape) as drafter:
        for sequence_id, text in enumerate(texts[30:]):
            drafter.start(sequence_id, text.astype(np.uint32))
            sizes += [len(drafter.draft(progress_of({sequence_id: []}, 32, cost=cost)).tokens) for cost in costs]
    assert (sizes[:-1] > 1.2 * sizes[1:]).all()
    assert sizes[-1] < 10


@given(worlds(), SHAPES)
@examples(80)
def test_every_token_follows_its_parent_in_some_text(world, shape):
    requests, prompt, other_prompt, produced, library = world
    # With matches of at most 5 tokens no pointer is set. Pointers predict tokens even after a mismatch.
    with drafter_in(world, draft_shape=shape, match_depth=5) as drafter:
        drafts = drafter.draft(progress_of({1: []}, MAX_DRAFT, cost=0.001))
        paths = []
        for token, parent in zip(drafts.tokens.tolist(), drafts.parents.tolist(), strict=True):
            before = paths[parent] if parent != ROOT else prompt
            # The path to a node is part of the request's own text.
            following = naive.transitions([*requests, *library, [*other_prompt, *produced], before])
            assert token in following[before[-1]]
            paths.append([*before, token])
