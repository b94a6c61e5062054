from hypothesis import example, given
from hypothesis import strategies as st

from ssd.article import ArticlePolicy
from ssd.config import DrafterConfig
from ssd.corpus import View
from tests import naive
from tests.strategies import LARGEST, array, corpus_and_context

EVERY_MATCH = DrafterConfig(policy="article", samples=10_000)


def draft(text, context, limit):
    policy = ArticlePolicy(EVERY_MATCH)
    view = View(array(text), policy.sort(array(text)), len(text))
    return policy.draft(view, policy.open(array(context)), limit)


@given(corpus_and_context(), st.integers(1, 8))
@example(([], [1]), 4)
@example(([[1]], [1]), 4)
@example(([[7] * 20], [7] * 50), 4)
@example(([[1, 2], [3, 4]], [2, 3]), 4)
@example(([[LARGEST, 0]], [LARGEST]), 4)
def test_the_most_frequent_whole_continuation_wins(corpus, limit):
    requests, context = corpus
    text = naive.ring_text(requests, 1000)
    path = draft(text, context, limit)
    expected, length = naive.article_draft(text, context, limit)
    assert path.tokens.tolist() == expected
    if expected:
        assert path.match_length == length


def test_of_equally_frequent_continuations_the_most_recent_wins():
    text = naive.ring_text([[1, 5], [1, 6]], 100)
    assert draft(text, [1], 3).tokens.tolist() == [6]


def test_it_looks_for_no_more_than_ten_tokens():
    text = naive.ring_text([list(range(30))], 100)
    assert draft(text, list(range(20)), 3).match_length == 10


def test_samples_bound_what_is_counted():
    policy = ArticlePolicy(DrafterConfig(policy="article", samples=4))
    text = array(naive.ring_text([[1, 2]] * 50, 1000))
    path = policy.draft(View(text, policy.sort(text), len(text)), policy.open(array([1])), 3)
    assert path.tokens.tolist() == [2]
