"""Properties of drafts: shape, threshold, and where they end."""

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.types import ROOT, Source
from tests import naive
from tests.curves import speedup_of
from tests.replay import drafter_of, progress_of
from tests.strategies import ALPHABETS, array, examples

MAX_DRAFT = 12
CLEARLY = 2.0
"""Multiple of the threshold from which a node's path probability is clearly above it."""
COSTS = st.sampled_from([0.001, 0.005, 0.02, 0.1, 0.3])


def worlds(max_requests=6):
    """Generate requests, the prompts of two running ones and the output of the second, over one alphabet."""

    def over(alphabet):
        runs = lambda size: st.lists(st.sampled_from(alphabet), max_size=size)  # noqa: E731
        return st.tuples(st.lists(runs(40), max_size=max_requests), runs(40), runs(40), runs(10))

    return ALPHABETS.flatmap(over)


def drafter_in(world, **settings):
    """Return a drafter with two running sequences; the output of sequence 2 is in the live tier."""
    requests, prompt, other_prompt, produced = world
    drafter = drafter_of(requests, max_draft=MAX_DRAFT, **settings)
    drafter.start(1, array(prompt))
    drafter.start(2, array(other_prompt))
    drafter.draft(progress_of({2: produced}, limit=0))
    drafter.corpus.refresh()
    return drafter


def shapes():
    return st.sampled_from(["path", "tree"])


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


@given(worlds(), shapes(), COSTS, st.integers(0, MAX_DRAFT + 3))
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


@given(worlds(), shapes(), COSTS, st.integers(1, MAX_DRAFT))
@examples(80)
def test_a_lower_limit_only_cuts_the_end_of_a_draft(world, shape, cost, limit):
    with drafter_in(world, draft_shape=shape) as drafter:
        short, long = (drafter.draft(progress_of({1: []}, most, cost=cost)) for most in (limit, MAX_DRAFT))
        assert nodes_of(short) == nodes_of(long)[:limit]


@given(worlds(), shapes())
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


@given(worlds(), shapes())
@examples(80)
def test_every_token_follows_its_parent_in_some_text(world, shape):
    requests, prompt, other_prompt, produced = world
    # With matches of at most 5 tokens no pointer is set. Pointers predict tokens even after a mismatch.
    with drafter_in(world, draft_shape=shape, match_depth=5) as drafter:
        drafts = drafter.draft(progress_of({1: []}, MAX_DRAFT, cost=0.001))
        paths = []
        for token, parent in zip(drafts.tokens.tolist(), drafts.parents.tolist(), strict=True):
            before = paths[parent] if parent != ROOT else prompt
            # The path to a node is part of the request's own text.
            following = naive.transitions([*requests, [*other_prompt, *produced], before])
            assert token in following[before[-1]]
            paths.append([*before, token])


@given(st.integers(0, 2**32), shapes())
@examples(60)
def test_no_draft_continues_in_another_request(seed, shape):
    """Requests have no token in common; the prompt copies a part of one, followed by another token."""
    rng = np.random.default_rng(seed)
    requests = [100 * request + rng.integers(0, 100, 30) for request in range(1, 6)]
    first = int(rng.integers(0, 20))
    prompt = np.append(requests[2][first:], rng.integers(0, 100))[: int(rng.integers(8, 30))].astype(np.uint32)
    with drafter_of(requests, draft_shape=shape, max_draft=MAX_DRAFT) as drafter:
        drafter.start(1, prompt)
        drafts = drafter.draft(progress_of({1: []}, MAX_DRAFT, cost=0.001))
        allowed = {*requests[2].tolist(), *prompt.tolist()}
        assert {*drafts.tokens.tolist()} <= allowed


def test_an_overlapping_repeat_is_drafted_beyond_the_end_of_the_text():
    with drafter_of() as drafter:
        drafter.start(1, array([1, 2, 3, 1, 2, 3, 1, 2, 3]))
        drafts = drafter.draft(progress_of({1: []}, limit=20, cost=0.001))
        assert drafts.tokens.tolist() == [1, 2, 3] * 6 + [1, 2]
        assert set(drafts.source.tolist()) == {Source.LOCAL}


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_tokens_that_do_not_pay_are_not_drafted(shape):
    text = np.random.default_rng(0).integers(0, 50, 2000)
    with drafter_of([text[:1000]], draft_shape=shape) as drafter:
        drafter.start(1, text[1000:].astype(np.uint32))
        assert len(drafter.draft(progress_of({1: []}, limit=9, cost=1.0)).tokens) == 0
        assert len(drafter.draft(progress_of({1: []}, limit=9, cost=0.3)).tokens) == 0


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_unseen_contexts_get_no_draft(shape):
    with drafter_of([[1, 2, 3]], draft_shape=shape) as drafter:
        drafter.start(1, array([4, 5, 6]))
        assert len(drafter.draft(progress_of({1: []}, limit=9, cost=1e-6)).tokens) == 0


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_a_draft_ends_where_requests_ended(shape):
    with drafter_of([[7, 8, 9]] * 3, draft_shape=shape) as drafter:
        drafter.start(1, array([1, 7]))
        drafts = drafter.draft(progress_of({1: []}, limit=9, cost=1e-6))
        assert drafts.tokens.tolist() == [8, 9]
        assert set(drafts.source.tolist()) == {Source.CORPUS}


def test_a_tree_has_a_branch_for_each_token_that_may_follow():
    requests = [[1, 2, 10 + kind, 20 + kind] for kind in range(3) for _ in range(4)]
    with drafter_of(requests, draft_shape="tree") as drafter:
        drafter.start(1, array([1, 2]))
        drafts = drafter.draft(progress_of({1: []}, limit=9, cost=0.001))
        parents = [-1 if parent == ROOT else int(drafts.tokens[parent]) for parent in drafts.parents]
        assert sorted(zip(parents, drafts.tokens.tolist(), strict=True)) == [
            (-1, 10), (-1, 11), (-1, 12), (10, 20), (11, 21), (12, 22),
        ]  # fmt: skip


def test_the_more_frequent_continuation_is_more_probable():
    with drafter_of([[1, 2, 5]] * 3 + [[1, 2, 6]] * 9, draft_shape="tree") as drafter:
        drafter.start(1, array([1, 2]))
        drafts = drafter.draft(progress_of({1: []}, limit=2, cost=0.001))
        assert drafts.tokens.tolist() == [6, 5]
        assert drafts.accept_prob[0] > 2 * drafts.accept_prob[1]


def test_a_pointer_continues_a_copy_after_a_changed_token():
    text = np.random.default_rng(0).permutation(1000)[:60].astype(np.uint32)
    with drafter_of([text]) as drafter:
        # The copy is continued after the changed token, which occurs nowhere else.
        drafter.start(1, text[:30])
        assert len(drafter.draft(progress_of({1: []}, limit=4)).tokens) == 4
        drafts = drafter.draft(progress_of({1: [5000]}, limit=4, cost=0.001))
        assert drafts.tokens.tolist()[:2] == text[31:33].tolist()


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("next_request", [[[900, 901, 902, 903]], []])
def test_a_pointer_stops_at_the_end_of_its_request(shape, next_request):
    copied, other = list(range(100, 120)), [50, 60, 61, 62, 63, 64, 65]
    with drafter_of([other, copied, *next_request], draft_shape=shape) as drafter:
        # Two tokens before the end of the copy, the text changes to that of another request.
        drafter.start(1, array(copied[:-2]))
        drafter.draft(progress_of({1: []}, limit=4))
        drafts = drafter.draft(progress_of({1: [50]}, limit=30, cost=1e-6))
        assert {*drafts.tokens.tolist()} <= {*copied, *other}
        assert 63 in drafts.tokens
