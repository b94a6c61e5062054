"""Compare the n-gram model with a naive one that follows the definition."""

from collections import Counter, defaultdict

import numpy as np
import pytest

from engine.training.kneser_ney import KneserNey

VOCAB = 6


class NaiveKneserNey:
    """Modified Kneser-Ney by recursion over dictionaries."""

    def __init__(self, tokens, order):
        self.order = order
        self.counts = {order: Counter(tuple(tokens[i : i + order]) for i in range(len(tokens) - order + 1))}
        for size in range(order - 1, 0, -1):
            left = defaultdict(set)
            for ngram in self.counts[size + 1]:
                left[ngram[1:]].add(ngram[0])
            self.counts[size] = {ngram: len(tokens) for ngram, tokens in left.items()}
        self.discounts = {size: self._discounts(counts.values()) for size, counts in self.counts.items()}

    @staticmethod
    def _discounts(counts):
        n = [max(1, sum(1 for c in counts if c == k)) for k in (1, 2, 3, 4)]
        y = n[0] / (n[0] + 2 * n[1])
        raw = [k - (k + 1) * y * n[k] / n[k - 1] for k in (1, 2, 3)]
        return [0.0] + [min(max(value, 0.0), k) for k, value in enumerate(raw, 1)]

    def probability(self, context, token, size=None):
        size = self.order if size is None else size
        if size == 0:
            return 1 / VOCAB
        context = tuple(context[len(context) - size + 1 :]) if size > 1 else ()
        following = {ngram[-1]: c for ngram, c in self.counts[size].items() if ngram[:-1] == context}
        lower = self.probability(context[1:], token, size - 1)
        if not following:
            return lower
        discount = [self.discounts[size][min(c, 3)] for c in following.values()]
        total = sum(following.values())
        own = following.get(token, 0)
        kept = (own - self.discounts[size][min(own, 3)]) / total
        return kept + sum(discount) / total * lower


@pytest.mark.parametrize("order", [1, 2, 3, 5])
def test_probabilities_equal_the_definition(order):
    rng = np.random.default_rng(order)
    trained = rng.choice(VOCAB, 300, p=[0.4, 0.3, 0.15, 0.1, 0.05, 0.0]).astype(np.uint16)
    held_out = rng.integers(0, VOCAB, 40).astype(np.uint16)
    naive = NaiveKneserNey(trained.tolist(), order)
    expected = [
        naive.probability(held_out[i - order + 1 : i].tolist(), int(held_out[i]))
        for i in range(order - 1, len(held_out))
    ]
    assert KneserNey(trained, VOCAB, order).probabilities(held_out) == pytest.approx(expected)


def test_probabilities_of_all_tokens_sum_to_one():
    rng = np.random.default_rng(0)
    model = KneserNey(rng.integers(0, VOCAB, 200).astype(np.uint16), VOCAB, 3)
    for context in ([1, 2], [5, 5], [0, 3]):
        total = sum(model.probabilities(np.array([*context, token]))[0] for token in range(VOCAB))
        assert total == pytest.approx(1.0)


def test_too_many_bits_are_refused():
    with pytest.raises(ValueError, match="do not fit"):
        KneserNey(np.zeros(10, np.uint16), 1 << 13, 5)
