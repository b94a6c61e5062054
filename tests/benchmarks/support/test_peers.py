"""The re-implemented drafters of other projects, against their definitions in words."""

import itertools
from collections import Counter

import numpy as np
import pytest

from benchmarks.support.drafters import Running
from benchmarks.support.peers.automaton import SuffixAutomata, SuffixAutomaton
from benchmarks.support.peers.prompt_lookup import VllmNgram
from benchmarks.support.peers.tries import RestLike, SglangNgram, Trie
from benchmarks.traces import Request


def text(seed, length, vocabulary=3):
    return np.random.default_rng(seed).integers(0, vocabulary, length).astype(np.uint32)


def running(tokens, prompt_length=1, index=0):
    return Running(index, Request(np.asarray(tokens, np.uint32), prompt_length, index))


def advance(drafter, sequence, count):
    """Commit `count` output tokens of a sequence, which must not end."""
    sequence.advance(0, count - 1)
    assert not sequence.is_finished
    drafter.commit(sequence)


def occurrences(needle, tokens):
    """Return where a list of tokens ends in another."""
    size = len(needle)
    return [end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == needle]


def branches(draft):
    """Return the paths of a draft from the context to each token."""
    paths = []
    for token, parent in zip(draft.tokens, draft.parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


@pytest.mark.parametrize("seed", range(20))
def test_vllm_drafts_after_the_first_of_the_longest_matches(seed):
    tokens = text(seed, 60, vocabulary=2 + seed)
    sequence = running(np.append(tokens, 0), prompt_length=len(tokens))
    expected, context = [], tokens.tolist()
    for length in range(5, 1, -1):
        if ends := [end for end in occurrences(context[-length:], context) if end < len(context)]:
            expected = context[ends[0] : ends[0] + 4]
            break
    assert VllmNgram(4).draft_one(sequence).tokens == expected


def test_vllm_drafts_nothing_for_a_short_text():
    assert VllmNgram(4).draft_one(running([1, 1], prompt_length=1)).tokens == []


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
    drafter = SuffixAutomata(3)
    first, second = running([1, 2, 3, 4, 5, 6, 0, 0], 6, 0), running([8, 3, 4, 0, 0], 3, 1)
    drafter.start(first)
    drafter.start(second)
    drafts, _ = drafter.draft([first, second])
    assert [draft.tokens for draft in drafts] == [[], [5, 6]]
    drafter.finish(first)
    assert drafter.draft_one(second).tokens == []


def test_automata_prefer_the_request_itself_and_use_its_output():
    drafter = SuffixAutomata(3)
    first, second = running([1, 2, 9, 9, 0, 0], 4, 0), running([1, 2, 5, 1, 2, 5, 1, 0], 2, 1)
    for sequence in (first, second):
        drafter.start(sequence)
    advance(drafter, second, 3)
    assert drafter.draft_one(second).tokens == [5, 1, 2]
    advance(drafter, second, 2)
    assert drafter.draft_one(second).tokens == [2, 5, 1]


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
    drafter, outputs = RestLike(12), [text(seed + 50 * number, 40) for number in range(3)]
    for index, output in enumerate(outputs):
        sequence = running(np.append(0, output), 1, index)
        drafter.start(sequence)
        drafter.finish(sequence)
    query = np.append(text(seed + 1000, 20), 0)
    draft = drafter.draft_one(running(query, len(query) - 1))
    context, texts = query[:-1].tolist(), [output.tolist() for output in outputs]
    for length in range(16, 1, -1):
        continuations = [tokens[end : end + 10] for tokens in texts for end in occurrences(context[-length:], tokens)]
        if any(continuations):
            break
    counts = Counter(tuple(tokens[: n + 1]) for tokens in continuations for n in range(len(tokens)))
    drafted = [tuple(path) for path in branches(draft)]
    assert len({*drafted}) == len(drafted) == min(12, len(counts))
    left_out = [count for path, count in counts.items() if path not in drafted]
    assert min(counts[path] for path in drafted) >= max(left_out, default=0)


def test_rest_needs_two_tokens_and_a_finished_request():
    drafter, sequence = RestLike(4), running([5, 1, 2, 3, 1, 2, 0], 1)
    drafter.start(sequence)
    advance(drafter, sequence, 5)
    assert drafter.draft_one(sequence).tokens == []
    drafter.finish(sequence)
    assert drafter.draft_one(running([9, 2, 0], 2, 1)).tokens == []
    assert drafter.draft_one(running([1, 2, 0], 2, 1)).tokens == [3, 0, 1, 2]


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
    drafter, naive = SglangNgram(8), NaiveSglang(8)
    tokens = text(seed, 60)
    sequence = running(tokens, 2)
    drafter.start(sequence)
    for count in (1, 3, 1, 2, 5, 1, 1, 4, 2, 3, 20):
        context = tokens[: sequence.length].tolist()
        assert [tuple(path) for path in branches(drafter.draft_one(sequence))] == naive.draft(context)
        advance(drafter, sequence, count)
        naive.commit(tokens[: sequence.length].tolist()[-18:])


def test_sglang_remembers_finished_requests():
    drafter = SglangNgram(2)
    sequence = running([1, 2, 3, 4], 1)
    drafter.start(sequence)
    sequence.advance(0, 2)
    drafter.finish(sequence)
    draft = drafter.draft_one(running([7, 2, 0], 2, 1))
    assert (draft.tokens, draft.parents) == ([3, 4], [-1, 0])
