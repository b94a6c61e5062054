"""The re-implemented drafters of other projects, against their definitions in words."""

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.support.peers import RestLike, SglangNgram, SuffixAutomata, SuffixAutomaton, Trie, VllmNgram
from tests.replay import branches


def text(seed, length, vocabulary=3):
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.uint32)


def started(drafter, *texts):
    """Begin a sequence for each text, all of which is committed; return the drafter."""
    for index, tokens in enumerate(texts):
        drafter.start(index, np.asarray(tokens[:1], np.uint32))
        drafter.commit(index, np.asarray(tokens[1:], np.uint32))
    return drafter


def commit(drafter, tokens, index=0):
    drafter.commit(index, np.asarray(tokens, np.uint32))


def finish(drafter, index=0):
    drafter.end(index)


def occurrences(needle, tokens):
    """Return where a list of tokens ends in another."""
    size = len(needle)
    return [end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == needle]


@pytest.mark.parametrize("seed", range(20))
def test_vllm_drafts_after_the_first_of_the_longest_matches(seed):
    tokens = text(seed, 60, vocabulary=2 + seed)
    expected, context = [], tokens.tolist()
    for length in range(5, 1, -1):
        if ends := [end for end in occurrences(context[-length:], context) if end < len(context)]:
            expected = context[ends[0] : ends[0] + 4]
            break
    assert started(VllmNgram(), tokens).speculate(0, 4).token_ids == expected


def test_vllm_drafts_nothing_for_a_short_text():
    assert started(VllmNgram(), [1]).speculate(0, 4).token_ids == []


@pytest.mark.parametrize("seed", range(10))
def test_an_automaton_finds_the_longest_matches_and_their_first_ends(seed):
    tokens = text(seed, 80).tolist()
    automaton = SuffixAutomaton()
    assert automaton.repeated() == (0, 0)
    for size in range(1, len(tokens) + 1):
        automaton.extend(tokens[size - 1 : size])
        seen = tokens[:size]
        lengths = [n for n in range(size) if n == 0 or any(e < size for e in occurrences(seen[size - n :], seen))]
        longest = max(lengths)
        end = occurrences(seen[size - longest :], seen)[0] if longest else 0
        assert automaton.repeated() == (longest, end)
    for query in (text(seed + 100, 12).tolist(), tokens[30:50], [7], []):
        found = [n for n in range(len(query) + 1) if n == 0 or occurrences(query[len(query) - n :], tokens)]
        end = occurrences(query[len(query) - max(found) :], tokens)[0] if max(found) else 0
        assert automaton.match(query) == (max(found), end)


def test_automata_search_active_requests_only():
    drafter = started(SuffixAutomata(), [1, 2, 3, 4, 5, 6], [8, 3, 4])
    assert [drafter.speculate(index, 3).token_ids for index in (0, 1)] == [[], [5, 6]]
    finish(drafter, 0)
    assert drafter.speculate(1, 3).token_ids == []


def test_automata_prefer_the_request_itself_and_use_its_output():
    drafter = started(SuffixAutomata(), [1, 2, 9, 9], [1, 2])
    commit(drafter, [5, 1, 2], 1)
    assert drafter.speculate(1, 3).token_ids == [5, 1, 2]
    commit(drafter, [5, 1], 1)
    assert drafter.speculate(1, 3).token_ids == [2, 5, 1]


def test_a_trie_counts_all_n_grams():
    tokens, trie = text(3, 40).tolist(), Trie(4)
    trie.insert(tokens)
    for length in range(1, 5):
        for gram in itertools.product(range(3), repeat=length):
            node = trie.find(gram)
            assert (node.count if node else 0) == len(occurrences(list(gram), tokens))
    assert trie.find(tokens[:5]) is None


@pytest.mark.parametrize("seed", range(10))
def test_rest_drafts_the_most_frequent_continuations_of_the_longest_match(seed):
    drafter, outputs = RestLike(), [text(seed + 50 * number, 40) for number in range(3)]
    for output in outputs:
        finish(started(drafter, np.append(0, output)))
    query = text(seed + 1000, 20)
    draft = started(drafter, query).speculate(0, 12)
    context, texts = query.tolist(), [output.tolist() for output in outputs]
    for length in range(16, 1, -1):
        continuations = [tokens[end : end + 10] for tokens in texts for end in occurrences(context[-length:], tokens)]
        if any(continuations):
            break
    counts = Counter(tuple(tokens[: n + 1]) for tokens in continuations for n in range(len(tokens)))
    drafted = [tuple(path) for path in branches(draft.token_ids, draft.parents)]
    assert len({*drafted}) == len(drafted) == min(12, len(counts))
    left_out = [count for path, count in counts.items() if path not in drafted]
    assert min(counts[path] for path in drafted) >= max(left_out, default=0)


def test_rest_needs_two_tokens_and_a_finished_request():
    drafter = started(RestLike(), [5, 1, 2, 3, 1, 2])
    assert drafter.speculate(0, 4).token_ids == []
    commit(drafter, [0])
    finish(drafter)
    assert started(drafter, [9, 2]).speculate(0, 4).token_ids == []
    finish(drafter)
    assert started(drafter, [1, 2]).speculate(0, 4).token_ids == [3, 0, 1, 2]


class NaiveSglang:
    """The same draft from a list of all insertions, by definition: children in order of their last insertion."""

    def __init__(self, k):
        self.k, self.inserted = k, []

    def commit(self, window):
        for start in range(len(window)):
            gram = window[start : start + 18]
            self.inserted += [tuple(gram[:n]) for n in range(1, len(gram) + 1)]

    def children(self, gram):
        last = {path[-1]: when for when, path in enumerate(self.inserted) if path[:-1] == gram}
        return sorted(last, key=last.get, reverse=True)

    def draft(self, context):
        drafted, step = [], 9 / 17
        for length in range(min(18, len(context)), 0, -1):
            match = tuple(context[len(context) - length :])
            waiting = [((), (17 - length) * step + 1)] if match in self.inserted else []
            for path, breadth in waiting:
                for token in self.children(match + path)[: max(1, int(breadth))]:
                    if len(drafted) == self.k:
                        return drafted
                    if (*path, token) not in drafted:
                        drafted.append((*path, token))
                    waiting.append(((*path, token), breadth - step))
                if len(drafted) == self.k:
                    return drafted
        return drafted


@pytest.mark.parametrize("seed", range(4))
def test_sglang_extends_matches_by_their_most_recent_continuations(seed):
    drafter, naive = SglangNgram(), NaiveSglang(8)
    tokens, done = text(seed, 60), 2
    drafter.start(0, tokens[:done])
    for count in (1, 3, 1, 2, 5, 1, 1, 4, 2, 3, 20):
        draft = drafter.speculate(0, 8)
        paths = branches(draft.token_ids, draft.parents)
        assert [tuple(path) for path in paths] == naive.draft(tokens[:done].tolist())
        commit(drafter, tokens[done : done + count])
        done += count
        naive.commit(tokens[:done].tolist()[-18:])


def test_sglang_remembers_finished_requests():
    drafter = started(SglangNgram(), [1, 2, 3, 4])
    finish(drafter)
    drafter.start(1, np.array([7, 2], np.uint32))
    draft = drafter.speculate(1, 2)
    assert (draft.token_ids, draft.parents) == ([3, 4], [-1, 0])
