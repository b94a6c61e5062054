"""A corpus through random histories equals lists: what it remembers, its suffix arrays, its log and running outputs.

Corpora are tiny here and merged in tiny slices, so that a few requests wrap around the ring many times. Any function
that a refresh calls may fail once for want of memory; the next refresh must then complete the work. Nothing may wait:
the only thread would wait for itself.
"""

import tempfile
from collections import Counter
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from ssd.corpus import index, live, merge, tier
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.rollout import NO_TAG
from ssd.corpus.search import Match, longest_match
from ssd.corpus.snapshot import load, save
from ssd.corpus.view import LIVE
from ssd.kernels.match import REACH, TIER_TEXT
from tests import naive
from tests.ssd.corpora import DEPTH, assert_whole, evidence_in, evidence_of, text_of, tiny_slices
from tests.strategies import ALPHABETS, array, examples

NAMES = st.sampled_from([None, "a", "b"])
TAGS = st.sampled_from([NO_TAG, NO_TAG, 5, 7 + 256])
CAPACITIES = st.sampled_from([256, 300, 420])
STEPS = [
    (index.Index, "_make_view"),
    (index, "Merge"),
    (index, "add_sorted"),
    (index, "sort_in_threads"),
    (index, "keep_positions"),
    (live, "merge_unsorted"),
    (merge, "merge_unsorted"),
    (merge, "find_places"),
    (merge, "merge_some"),
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


@dataclass(eq=False)
class Running:
    """A running request: its number, the text before its output, the output, and places of it that were left out."""

    owner: int
    prefix: list[int]
    output: list[int] = field(default_factory=list)
    skipped: set[int] = field(default_factory=set)
    is_shown: bool = True


class CorpusMachine(RuleBasedStateMachine):
    @initialize(alphabet=ALPHABETS, capacity=CAPACITIES)
    def begin(self, alphabet, capacity):
        self.patches = pytest.MonkeyPatch()
        self.tiny = tiny_slices()
        self.tiny.__enter__()
        self.patches.setattr(tier.Tier, "wait_until_unread", no_waiting(tier.Tier.wait_until_unread))
        self.now, self.alphabet = 1000.0, alphabet
        self.corpus = Corpus(capacity, DEPTH, lambda: self.now)
        self.text = []
        """All text since the corpus was made or loaded, with separators in place of what was forgotten."""
        self.readable = 0
        """The first position that must be indexed if nothing was removed since."""
        self.requests, self.waiting, self.forgets, self.running = [], [], [], []
        self.errors, self.is_refreshed = [], True

    def teardown(self):
        if hasattr(self, "patches"):
            self.tiny.__exit__(None, None, None)
            self.patches.undo()

    def tokens(self, data, most):
        return data.draw(st.lists(st.sampled_from(self.alphabet), max_size=most))

    @rule(data=st.data(), number=st.integers(1, 6), name=NAMES, tag=TAGS)
    def append(self, data, number, name, tag):
        for tokens in [self.tokens(data, 28) for _ in range(number)]:
            given, self.now = array(tokens), self.now + 1
            assert self.corpus.append(given, name, tag)
            given[:] = 77  # The caller may use its array again.
            if tokens:
                self.waiting.append(Request(tokens, name, self.now, tag))
        self.is_refreshed = False

    @rule(seconds=st.integers(1, 5))
    def wait(self, seconds):
        self.now += seconds

    @rule(name=st.sampled_from(["a", "b", "unknown"]))
    def forget(self, name):
        self.forgotten((name, 0.0), self.corpus.forget(name))

    @rule(age=st.integers(0, 20))
    def forget_older_than(self, age):
        self.forgotten((None, self.now - age), self.corpus.forget_older_than(age))

    def forgotten(self, forget, command):
        here = [each for each in self.waiting if each.is_matched(forget)]
        self.waiting = [each for each in self.waiting if each not in here]
        self.forgets.append((forget, command, len(here)))
        self.is_refreshed = False

    @rule(data=st.data(), is_shown=st.booleans(), tag=TAGS)
    def start(self, data, is_shown, tag):
        prefix = self.tokens(data, 2 * DEPTH)
        owner = self.corpus.start_running(array(prefix) if is_shown else None, tag)
        self.running.append(Running(owner, prefix, is_shown=is_shown))
        self.is_refreshed = False

    @precondition(lambda self: self.running)
    @rule(data=st.data(), repeats=st.sampled_from([1, 1, 1, 40]))
    def extend(self, data, repeats):
        runs = [self.tokens(data, 12) * repeats for _ in self.running]
        offsets = np.cumsum([0, *map(len, runs)]).astype(np.uint32)
        owners = np.array([each.owner for each in self.running])
        self.corpus.extend_running(owners, array([token for run in runs for token in run]), offsets)
        for each, run in zip(self.running, runs, strict=True):
            each.output += run
        self.is_refreshed = False

    @precondition(lambda self: self.running)
    @rule(data=st.data(), at=st.integers(0, 9))
    def skip(self, data, at):
        each, gap = self.running[at % len(self.running)], self.tokens(data, 2 * DEPTH)
        each.skipped.update(range(len(each.output), len(each.output) + len(gap)))
        each.output += gap
        self.corpus.skip_running(each.owner, array([*each.prefix, *each.output]))
        self.is_refreshed = False

    @precondition(lambda self: self.running)
    @rule(at=st.integers(0, 9), ends=st.booleans())
    def end(self, at, ends):
        each = self.running[at % len(self.running)]
        if ends:
            self.corpus.end_running(each.owner)
            self.running.remove(each)
        else:
            self.corpus.hide_running(each.owner)
            each.is_shown = False
        self.is_refreshed = False

    @rule()
    def refresh(self):
        self.refreshed(self.corpus.refresh)

    @rule(step=st.sampled_from(STEPS), call=st.integers(0, 2))
    def refresh_after_a_failure(self, step, call):
        def refresh():
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(*step, failing_at(call, getattr(*step)))
                try:
                    self.corpus.refresh()
                except MemoryError as error:
                    self.errors.append(error)  # As a log handler keeps it.
                    self.corpus.refresh()

        self.refreshed(refresh)

    @rule()
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
                self.text[each.first : each.end] = [naive.SEPARATOR] * (each.end - each.first)
        kept = [each for each in self.requests if not any(each.is_matched(forget) for forget, *_ in self.forgets)]
        self.requests = [*kept, *self.waiting]
        for each in self.waiting:
            each.first = len(self.text)
            self.text += [*each.tokens, naive.SEPARATOR]
        refresh()
        for (_, command, _), expected in zip(self.forgets, counts, strict=True):
            assert command.requests == expected
        self.waiting, self.forgets, self.is_refreshed = [], [], True
        self.check()

    @rule(capacity=CAPACITIES)
    def restore_from_a_snapshot(self, capacity):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "corpus.ssd"
            self.refreshed(lambda: save(self.corpus, path))
            before, had_room = text_of(self.corpus).tolist(), self.corpus.state().oldest == 0
            self.corpus = load(path, capacity, DEPTH, lambda: self.now).corpus
        kept = text_of(self.corpus).tolist()
        assert len(kept) >= min(capacity, len(before))
        cut = len(self.text) - len(kept)
        self.readable = 0 if had_room and len(kept) == len(before) else DEPTH
        self.text, self.running = self.text[cut:], []
        for each in self.requests:
            each.first -= cut
        self.check()

    def check(self):
        self.check_text()
        self.check_log()
        self.check_running()

    def check_text(self):
        state, text = self.corpus.state(), text_of(self.corpus).tolist()
        assert min(self.corpus.capacity, len(self.text)) <= len(text) <= state.ring.capacity
        assert text == self.text[len(self.text) - len(text) :]
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
        assert self.corpus.requests == len(rows)
        first = max(self.corpus.state().ring.oldest, int(rows["first"][0])) if len(rows) else state.head
        assert self.corpus.tokens == state.head - first
        for name in ("a", "b"):
            newest = next((each for each in reversed(self.requests) if each.name == name), None)
            is_held = newest is not None and newest.first + shift >= self.corpus.state().ring.oldest
            assert self.corpus.text_of(name).tolist() == (newest.tokens if is_held else [])

    def check_running(self):
        shown = [(each.prefix[-DEPTH:], each.output, each.skipped) for each in self.running if each.is_shown]
        view = self.corpus.view
        found = evidence_in(view.suffix_arrays[LIVE].positions, int(view.arrays[0][LIVE, TIER_TEXT]))
        assert found == sum((evidence_of(*each) for each in shown), Counter())
        assert self.corpus.has_several_running == (len(self.running) > 1)

    @precondition(lambda self: self.is_refreshed and not self.running and self.text)
    @rule(data=st.data())
    def search(self, data):
        """Search for the end of a request, or for any tokens."""
        text, context = text_of(self.corpus).tolist(), self.tokens(data, 2 * DEPTH)
        oldest = self.readable if self.corpus.state().oldest == 0 else DEPTH
        lengths = {
            position: naive.common_length(text, position, context, len(context), DEPTH)
            for position in naive.usable_positions(text)
            if position >= oldest
        }
        longest = max(lengths.values(), default=0)
        found = [position for position, length in lengths.items() if length == longest > 0]
        match = longest_match(self.corpus.view, array(context), DEPTH)
        if len(found) < REACH:
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


def failing_at(call, function):
    """Return `function`, which raises MemoryError at its call number `call`."""
    calls = count()

    def call_or_fail(*given):
        if next(calls) == call:
            raise MemoryError
        return function(*given)

    return call_or_fail


TestCorpus = CorpusMachine.TestCase
TestCorpus.settings = settings(examples(40), stateful_step_count=40)
