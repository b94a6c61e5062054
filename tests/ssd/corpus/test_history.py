"""A corpus through random histories equals lists: what it remembers, its suffix arrays and its log.

Corpora are tiny here and merged in tiny slices, so that a few requests wrap around the ring many times. Any function
that a refresh calls may fail once for want of memory; the next refresh must then complete the work. Nothing may wait:
the only thread would wait for itself.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from ssd.corpus import index, tier
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.ring import PAD
from ssd.corpus.rollout import NO_TAG, TAGGED
from ssd.corpus.search import MAX_COMPARED, Match, longest_match
from ssd.corpus.snapshot import load, save
from tests import naive
from tests.ssd.addresses import uint32_at
from tests.ssd.corpora import DEPTH, assert_whole, text_of, tiny_slices
from tests.strategies import TOKEN_SETS, array, assert_covered, examples

TAGS = [NO_TAG, NO_TAG, 5, 7 + 256]
CAPACITIES = [256, 300, 420]
STEPS = [
    (index.Index, "_make_view"),
    (index, "Merge"),
    (index, "add_sorted"),
    (index, "sort_in_threads"),
    (index, "keep_positions"),
    (tier, "merge_unsorted"),
    (tier, "find_places"),
    (tier, "merge_some"),
]
"""Functions called by a refresh that may fail."""


@dataclass(eq=False)
class Request:
    """A finished request."""

    tokens: list[int]
    name: str | None
    time: float
    tag: int
    first: int = -1
    """Its place in the text; -1 until it is indexed."""

    @property
    def end(self):
        return self.first + len(self.tokens) + 1

    def is_matched(self, forget):
        return self.time < forget[1] if forget[0] is None else self.name == forget[0]


class History:
    """A corpus, and lists of what it should contain."""

    EVENTS = (
        *("append",) * 8, "forget", "forget_older_than", *("refresh",) * 4, *("refresh_after_a_failure",) * 8,
        *("settle",) * 2, "restore", *("search",) * 2,
    )  # fmt: skip

    def __init__(self, seed):
        self.rng, self.now = np.random.default_rng(seed), 1000.0
        self.alphabet = TOKEN_SETS[seed % len(TOKEN_SETS)]
        self.corpus = Corpus(int(self.rng.choice(CAPACITIES)), DEPTH, lambda: self.now)
        self.text = []
        """All text since the corpus was made or loaded, with separators in place of what was forgotten."""
        self.readable = 0
        """The first position that must be indexed if nothing was removed since."""
        self.requests, self.waiting, self.forgets = [], [], []
        self.errors, self.seen = [], Counter()

    def run(self, steps=60):
        for _ in range(steps):
            getattr(self, str(self.rng.choice(self.EVENTS)))()
        self.seen["base merges"] += self.corpus.times.base_merges
        self.seen["full builds"] += self.corpus.times.full_builds
        return self.seen

    def tokens(self, most):
        return self.rng.choice(self.alphabet, self.rng.integers(most + 1)).tolist()

    def append(self):
        name, tag = self.rng.choice([None, "a", "b", "c"]), int(self.rng.choice(TAGS))
        # Of more waiting text than the capacity, the oldest would be left out.
        for _ in range(self.rng.integers(1, 7) if self.corpus.waiting < 80 else 0):
            tokens, self.now = self.tokens(28), self.now + 1
            given = array(tokens)
            assert self.corpus.append(given, name, tag)
            given[:] = 77  # The caller may use its array again.
            if tokens:
                self.waiting.append(Request(tokens, name, self.now, tag))

    def forget(self):
        name = str(self.rng.choice(["a", "b", "unknown"]))
        self.forgotten((name, 0.0), self.corpus.forget(name))

    def forget_older_than(self):
        age = int(self.rng.integers(60))
        self.forgotten((None, self.now - age), self.corpus.forget_older_than(age))

    def forgotten(self, forget, command):
        here = [each for each in self.waiting if each.is_matched(forget)]
        self.waiting = [each for each in self.waiting if each not in here]
        self.forgets.append((forget, command, len(here)))
        self.seen["waiting forgotten"] += len(here)

    def refresh(self):
        self.refreshed(self.corpus.refresh)

    def refresh_after_a_failure(self):
        """Let any of the functions that a refresh calls fail once."""
        calls, last = count(), int(self.rng.integers(8))

        def failing(name, function):
            def call_or_fail(*given):
                if next(calls) == last:
                    self.seen[name] += 1
                    raise MemoryError
                return function(*given)

            return call_or_fail

        def refresh():
            with pytest.MonkeyPatch.context() as patch:
                for module, name in STEPS:
                    patch.setattr(module, name, failing(name, getattr(module, name)))
                try:
                    self.corpus.refresh()
                except MemoryError as error:
                    self.errors.append(error)  # As a log handler keeps it.
                    self.corpus.refresh()

        self.append()
        if self.rng.random() < 0.2:
            self.forget()
        self.refreshed(refresh)

    def settle(self):
        self.refreshed(self.corpus.refresh)
        while self.corpus.is_merging:
            self.corpus.refresh()
        self.check()

    def refreshed(self, refresh):
        """Refresh the corpus and the lists."""
        rows, counts = self.corpus.state().rows, []
        known = self.requests[len(self.requests) - len(rows) :]
        for forget, _, here in self.forgets:
            matched = [each for each in self.requests if each.is_matched(forget)]
            counts.append(here + sum(each in known for each in matched))
            for each in matched:
                own = range(max(0, each.first), max(0, each.end))
                self.text[own.start : own.stop] = [naive.SEPARATOR] * len(own)
        kept = [each for each in self.requests if not any(each.is_matched(forget) for forget, *_ in self.forgets)]
        self.requests = [*kept, *self.waiting]
        for each in self.waiting:
            each.first = len(self.text)
            self.text += [*each.tokens, naive.SEPARATOR]
        refresh()
        for (_, command, _), expected in zip(self.forgets, counts, strict=True):
            assert command.requests == expected
            self.seen["forgotten"] += expected
        self.waiting, self.forgets = [], []
        self.check()

    def restore(self):
        """Continue with a corpus of the same or another capacity that is loaded from all or the newest text."""
        capacity, most = int(self.rng.choice(CAPACITIES)), self.rng.choice([None, None, None, 200])
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.ssd"
            self.refreshed(lambda: save(self.corpus, path, max_tokens=most))
            capacity_before = self.corpus.capacity
            before, had_room = text_of(self.corpus).tolist(), self.corpus.state().oldest == 0
            self.corpus, _, notes = load(path, capacity, DEPTH, lambda: self.now)
        kept, saved = text_of(self.corpus).tolist(), min(most or len(before), len(before))
        assert min(capacity, saved) <= len(kept) <= saved
        # A corpus may hold a little more than its capacity, and is loaded as a whole by one of the same capacity.
        is_cut = min(saved, capacity_before) > capacity
        assert any("only the newest are loaded" in note for note in notes) == is_cut
        cut = len(self.text) - len(kept)
        self.readable = self.readable if had_room and len(kept) == len(before) else DEPTH
        self.text = self.text[cut:]
        for each in self.requests:
            each.first -= cut
            if each.first < 0 < each.end:  # The corpus has only the rest of it.
                each.tokens, each.first = each.tokens[-each.first :], 0
        self.check()

    def check(self):
        self.check_text()
        self.check_log()
        self.check_tags()

    def check_text(self):
        state, text = self.corpus.state(), text_of(self.corpus).tolist()
        assert min(self.corpus.capacity, len(self.text)) <= len(text) <= state.ring.capacity
        assert text == self.text[len(self.text) - len(text) :]
        # Kernels read beyond both ends, where forgotten text must not remain either.
        memory = uint32_at(state.ring.address - 4 * PAD, state.ring.capacity + 2 * PAD)
        assert np.array_equal(memory[:PAD], state.ring.slots[-PAD:])
        assert state.ring.head < PAD or np.array_equal(memory[-PAD:], state.ring.slots[:PAD])
        assert_whole(self.corpus, self.readable)
        assert self.corpus.waiting == 0

    def check_log(self):
        state, shift = self.corpus.state(), self.corpus.state().head - len(self.text)
        rows = state.rows
        expected = [(each.first + shift, hash_of(each.name), each.time, each.tag) for each in self.requests]
        found = [(max(int(row["first"]), state.oldest), *row.tolist()[1:]) for row in rows]
        kept = expected[len(expected) - len(rows) :]
        assert found == [(max(first, state.oldest), *rest) for first, *rest in kept]
        assert len(kept) == len(rows) >= sum(first >= state.oldest for first, *_ in expected)
        remembered = sum(each.end + shift > state.ring.oldest for each in self.requests)
        # One more: the text after the oldest row may have been forgotten.
        assert remembered <= self.corpus.requests <= remembered + 1
        first = max(self.corpus.state().ring.oldest, int(rows["first"][0])) if len(rows) else state.head
        assert self.corpus.tokens == state.head - first
        for name in ("a", "b"):
            newest = next((each for each in reversed(self.requests) if each.name == name), None)
            is_held = newest is not None and newest.first + shift >= self.corpus.state().ring.oldest
            assert self.corpus.text_of(name).tolist() == (newest.tokens if is_held else [])

    def check_tags(self):
        """Check that a block of slots has the tag of the request that has most of it."""
        ring, shift = self.corpus.state().ring, self.corpus.state().head - len(self.text)
        for each in self.requests:
            own = np.arange(max(0, each.first + shift, ring.head - ring.capacity), each.end + shift)
            blocks, counts = np.unique(own % ring.capacity // TAGGED, return_counts=True)
            assert set(ring.tags[blocks[counts > TAGGED // 2]].tolist()) <= {each.tag}

    def search(self):
        """Search for a context."""
        self.refresh()
        text, context = text_of(self.corpus).tolist(), self.tokens(2 * DEPTH)
        oldest = self.readable if self.corpus.state().oldest == 0 else DEPTH
        lengths = {
            position: naive.common_length(text, position, context, len(context), DEPTH)
            for position in naive.usable_positions(text)
            if position >= oldest
        }
        longest = max(lengths.values(), default=0)
        found = [position for position, length in lengths.items() if length == longest > 0]
        match = longest_match(self.corpus.view, array(context), DEPTH)
        self.seen["found"] += len(found) > 0
        if len(found) < MAX_COMPARED:
            assert match == Match(longest, len(text) - found[-1] if found else -1)
        assert match.length == longest


def no_waiting(wait):
    """Return a function that fails where the only thread would wait for itself."""

    def wait_or_fail(self, timeout_s):
        is_unread = wait(self, 0)
        assert is_unread or timeout_s < tier.READERS_LIMIT_S, (
            "the refresh waits for a suffix array that the index holds itself"
        )
        return is_unread

    return wait_or_fail


@pytest.fixture(autouse=True)
def tiny_parts(monkeypatch):
    """Allow tiny corpora; the only thread must not wait for itself."""
    monkeypatch.setattr(tier.Tier, "wait_until_unread", no_waiting(tier.Tier.wait_until_unread))
    with tiny_slices():
        yield


def test_a_corpus_equals_lists():
    seen = sum((History(seed).run() for seed in range(examples(60).max_examples)), Counter())
    events = ("base merges", "full builds", "forgotten", "waiting forgotten", "found", *(name for _, name in STEPS))
    assert_covered(seen, events, 10)
