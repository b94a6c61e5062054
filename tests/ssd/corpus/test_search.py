"""The longest match of a text in the corpus, compared with a slow reference."""

from hypothesis import given

from ssd.corpus.corpus import Corpus
from ssd.corpus.search import Match, longest_match
from ssd.kernels.match import REACH
from tests import naive
from tests.ssd.corpora import DEPTH
from tests.strategies import array, corpus_and_context, examples


@given(corpus_and_context())
@examples(60)
def test_the_longest_match_is_found_with_its_age(corpus_and_context):
    requests, context = corpus_and_context
    corpus = Corpus(5000, DEPTH)
    # The requests are in several tiers.
    for request in requests:
        corpus.append(array(request))
        corpus.refresh()
    text = naive.concatenated(requests)
    lengths = {
        position: naive.common_length(text, position, context, len(context), DEPTH)
        for position in naive.usable_positions(text)
    }
    longest = max(lengths.values(), default=0)
    found = [position for position, length in lengths.items() if length == longest > 0]
    match = longest_match(corpus.view, array(context), DEPTH)
    if len(found) < REACH:
        assert match == Match(longest, len(text) - found[-1] if found else -1)
    else:
        assert match.length == longest
