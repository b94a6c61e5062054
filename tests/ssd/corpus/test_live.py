"""The live tier: the output of running requests, which is drafted for others."""

import os
import threading
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.rollout import NO_TAG, Rollout
from ssd.drafter import SuffixDrafter
from ssd.kernels import live as module
from ssd.kernels.live import BLOCK, BYTES_PER_SLOT, ENDED, FREE, LEAVING, LEFT, NEXT, PUBLISHED_AT_ONCE, LiveTier
from ssd.sequences.local_index import LocalIndex
from ssd.sequences.tables import LIVE_END, PUBLISHED, Sequences
from tests.replay import drafter_of, progress_of
from tests.ssd.corpora import DEPTH, evidence_in, evidence_of
from tests.strategies import TOKEN_SETS, array, assert_covered, examples
from tests.waiting import eventually


def evidence(tier):
    """Return what searches may find, as `evidence_of` does, after checking the front suffix array."""
    arrays = tier.arrays
    front = int(arrays.front[0])
    positions = arrays.suffixes[front, : arrays.sizes[front]]
    evidence_in(positions, arrays.text.ctypes.data)
    assert not arrays.readers.any()
    assert not arrays.writing.any()
    assert not arrays.merging.any()
    assert (arrays.owners[positions // BLOCK] > LEFT).all()
    return evidence_in(positions[arrays.owners[positions // BLOCK] >= 0], arrays.text.ctypes.data)


@dataclass(eq=False)
class Request:
    """A running request: its text, the first token that others may see, and how many were published."""

    owner: int
    row: int
    text: list[int]
    first: int
    published: int
    is_shared: bool
    tag: int
    left_out: set[int] = field(default_factory=set)

    def publish(self):
        begin = max(self.published, len(self.text) - PUBLISHED_AT_ONCE)
        self.left_out.update(range(self.published - self.first, begin - self.first))
        self.published = len(self.text)

    def evidence(self):
        given = self.given - self.first
        shown = self.text[self.first : self.published]
        hidden = {each - given for each in self.left_out if each >= given}
        return evidence_of(shown[:given], shown[given:], hidden)

    def __post_init__(self):
        self.given = len(self.text)


class History:
    """Random requests over a live tier, and lists of what it should contain."""

    EVENTS = (*("start",) * 2, *("extend",) * 6, *("publish",) * 6, "end", *("merge",) * 3)

    def __init__(self, seed, blocks):
        self.rng = np.random.default_rng(seed)
        self.alphabet = TOKEN_SETS[seed % len(TOKEN_SETS)]
        self.tier, self.sequences = LiveTier(DEPTH, blocks), Sequences(4)
        self.running, self.owners, self.seen = [], 0, Counter()

    def run(self, steps=60):
        for _ in range(steps):
            getattr(self, str(self.rng.choice(self.EVENTS)))()
            self.check_owners()
        return self.seen

    def tokens(self, most):
        return self.rng.choice(self.alphabet, self.rng.integers(most + 1)).tolist()

    def any_running(self):
        return self.running[self.rng.integers(len(self.running))] if self.running else None

    def start(self):
        text, is_shared, tag = self.tokens(2 * DEPTH), bool(self.rng.random() < 0.8), int(self.rng.choice([NO_TAG, 7]))
        first = int(self.rng.integers(len(text) + 1))
        local = LocalIndex(DEPTH)
        local.adopt(local.continue_with(array(text)).sort())
        row = self.sequences.add(local, self.owners, shared_from=first if is_shared else None, tag=tag)
        self.running.append(Request(self.owners, row, text, first, len(text), is_shared, tag))
        self.owners += 1

    def extend(self):
        for each in self.running:
            added = self.tokens(12) * int(self.rng.choice([1, 1, 1, 1, 40]))
            self.sequences.extend(each.row, array(added))
            each.text += added

    def publish(self):
        chosen = [each for each in self.running if self.rng.random() < 0.8]
        rows = np.array([each.row for each in chosen], np.int64)
        self.seen["for another thread"] += self.tier.publish(self.sequences.state, rows)
        for each in chosen:
            if each.is_shared:
                each.publish()
                self.seen["gaps"] += len(each.left_out) > 0

    def end(self):
        if each := self.any_running():
            self.tier.end(each.owner)
            self.sequences.remove(each.row)
            self.running.remove(each)

    def merge(self):
        self.tier.merge()
        assert not self.tier.is_waiting
        self.check()

    def expected(self):
        return sum((each.evidence() for each in self.running if each.is_shared), Counter())

    def check(self):
        assert evidence(self.tier) == self.expected()
        self.seen["found"] += 1

    def check_owners(self):
        """Check that blocks are those of running requests, or wait to be used again, and have the tags of owners."""
        arrays = self.tier.arrays
        tags = {each.owner: each.tag for each in self.running}
        for owner, tag in zip(arrays.owners.tolist(), arrays.tags.tolist(), strict=True):
            assert owner in (ENDED, LEFT, FREE) or tags[owner] == tag
        assert arrays.owners[0] == FREE


class FullHistory(History):
    """The same with so few blocks that output is left out."""

    def check(self):
        found = evidence(self.tier)
        assert found <= self.expected()
        self.seen["left out"] += found != self.expected()


def test_a_live_tier_equals_lists():
    seen = sum((History(seed, 200).run() for seed in range(examples(40).max_examples)), Counter())
    assert_covered(seen, ("found", "gaps", "for another thread"), 5)


def test_output_without_room_is_left_out():
    seen = sum((FullHistory(seed, 2 + seed % 3).run() for seed in range(examples(40).max_examples)), Counter())
    assert_covered(seen, ("left out",), 5)


def started(tier, sequences, owner, prompt):
    local = LocalIndex(DEPTH)
    local.adopt(local.continue_with(array(prompt)).sort())
    return sequences.add(local, owner, shared_from=0)


def published(tier, sequences, row, tokens):
    sequences.extend(row, array(tokens))
    tier.publish(sequences.state, np.array([row]))


def test_a_request_without_room_continues_after_a_gap():
    tier, sequences = LiveTier(DEPTH, 2), Sequences(4)
    first = started(tier, sequences, 1, [1])
    published(tier, sequences, first, [2])
    second = started(tier, sequences, 2, [5, 6])
    published(tier, sequences, second, [7, 8])  # No block is free, and the next request need not look for one.
    assert tier.arrays.facts[NEXT] == 2
    tier.end(1)
    assert tier.arrays.sizes[tier.arrays.front[0]] == 0
    published(tier, sequences, second, [9])
    assert evidence(tier) == evidence_of([5, 6, 7, 8], [9])


def test_a_tier_is_waiting_until_a_merge_ends():
    tier = LiveTier(DEPTH, 3)
    assert not tier.is_waiting
    tier.arrays.merging[:] = 1  # As while a merge writes what it has taken over.
    assert tier.is_waiting


def wait_for_merges(corpus):
    eventually(lambda: not corpus.live.is_waiting)


def test_merges_that_another_thread_has_to_do_free_blocks():
    """Two requests fill all blocks in turn, in a corpus whose index is too large for the drafting thread."""
    corpus = Corpus(5000, DEPTH)
    corpus.live = LiveTier(DEPTH, 80)
    corpus.maintain(0.0005)
    sequences = Sequences(4)
    for turn in range(8):
        owner = corpus.start_running()
        corpus.start_running()
        row = started(corpus.live, sequences, owner, [turn])
        for part in range(75):
            sequences.extend(row, np.arange(part * 256, part * 256 + 200, dtype=np.uint32))
            corpus.publish(sequences.state, np.array([row]))
            wait_for_merges(corpus)
        assert evidence(corpus.live).total() > 10_000
        corpus.end_running(owner)
        wait_for_merges(corpus)
        assert evidence(corpus.live).total() == 0
    corpus.close()


def test_a_block_is_used_again_only_when_nobody_reads_it():
    tier, sequences = LiveTier(DEPTH, 3), Sequences(4)
    rows = {owner: started(tier, sequences, owner, [owner]) for owner in (1, 3)}
    for row in rows.values():
        published(tier, sequences, row, [2])
    front = int(tier.arrays.front[0])
    tier.arrays.readers[front] += 1  # As `enter` does.
    text = tier.arrays.text.copy()
    tier.end(1)
    rows[2] = started(tier, sequences, 2, [5])
    for _ in range(3):  # One merge leaves the block out; the next ones would write what is being read.
        tier.merge()
        published(tier, sequences, rows[2], [6])
        published(tier, sequences, rows[3], [4])
    block = int((tier.arrays.text[: 3 * BLOCK : BLOCK] == module.SEPARATOR).nonzero()[0][1])
    assert np.array_equal(tier.arrays.text[block * BLOCK : block * BLOCK + 3], text[block * BLOCK : block * BLOCK + 3])
    assert tier.is_waiting
    tier.arrays.readers[front] -= 1
    tier.merge()
    tier.merge()
    published(tier, sequences, rows[2], [7])
    assert evidence(tier) == evidence_of([5, 6, 6, 6], [7]) + evidence_of([3], [2, 4, 4, 4])


@pytest.mark.parametrize("room", range(DEPTH + 4))
def test_a_gap_near_the_end_of_a_block_stays_inside_it(room):
    tier, sequences = LiveTier(DEPTH, 6), Sequences(4)
    rows = [started(tier, sequences, owner, []) for owner in (1, 2)]
    produced = list(range(1, BLOCK - room))
    for row, tokens in zip(rows, (produced, [5000, 5001, 5002]), strict=True):
        published(tier, sequences, row, tokens)
    gap = list(range(2000, 2000 + PUBLISHED_AT_ONCE + 2 * DEPTH))
    published(tier, sequences, rows[0], gap)
    tier.merge()
    left_out = range(len(produced), len(produced) + 2 * DEPTH)
    assert evidence(tier) == evidence_of([], [*produced, *gap], left_out) + evidence_of([], [5000, 5001, 5002])
    assert sequences.state[rows[0], PUBLISHED] == len(produced) + len(gap)
    assert sequences.state[rows[0], LIVE_END] > 0


def test_a_merge_that_fails_for_want_of_memory_is_abandoned(monkeypatch):
    tier, sequences = LiveTier(DEPTH, 9), Sequences(4)
    rows = {owner: started(tier, sequences, owner, [owner]) for owner in (1, 2)}
    for row in rows.values():
        published(tier, sequences, row, [3, 4])

    def fail(_addresses, _depth):
        tier.arrays.merging[:] = 1
        tier.arrays.owners[tier.arrays.owners == ENDED] = LEAVING
        raise MemoryError

    monkeypatch.setattr(module, "_merge", fail)
    with pytest.raises(MemoryError):
        tier.merge()
    monkeypatch.undo()
    tier.end(1)
    published(tier, sequences, rows[2], [5])
    assert evidence(tier) == evidence_of([2], [3, 4, 5])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")
def test_a_forked_child_does_not_wait_for_threads_of_its_parent():
    tier, sequences = LiveTier(DEPTH, 9), Sequences(4)
    row = started(tier, sequences, 1, [1])
    tier.arrays.writing[:] = tier.arrays.merging[:] = tier.arrays.readers[:] = 1
    child = os.fork()
    if child == 0:
        published(tier, sequences, row, [2, 3])
        os._exit(0 if evidence(tier) == evidence_of([1], [2, 3]) else 1)
    assert os.waitpid(child, 0)[1] == 0


@pytest.mark.parametrize("threads", [3])
def test_drafters_of_several_threads_publish_and_search(threads):
    """Each drafts what the others produce while blocks are used again; in the end all text is found once."""
    corpus, failures, texts = Corpus(5000, DEPTH), [], {}
    corpus.maintain(0.001)

    def run(number):
        rng = np.random.default_rng(number)
        drafter = SuffixDrafter(DrafterConfig(capacity=5000, match_depth=DEPTH), corpus=corpus)
        try:
            for request in range(30):
                text = [number, request]
                drafter.start(request, array(text))
                for _ in range(20):
                    added = rng.integers(0, 50, rng.integers(1, 9)).tolist()
                    drafter.draft(progress_of({request: added}, 8, cost=0.01))
                    text += added
                if request < 29:
                    drafter.finish(request, array([]), learn=False)
            texts[number] = text
        except Exception as problem:
            failures.append(problem)

    workers = [threading.Thread(target=run, args=(number,)) for number in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    corpus.close()
    assert not failures
    corpus.live.merge()
    # The first tokens of a request are not published if it was the only one.
    found = evidence(corpus.live)
    assert found <= sum((evidence_of(text[:2], text[2:]) for text in texts.values()), Counter())
    assert found.total() > 0


def draft(drafter, sequence_id, tokens=(), limit=8):
    return drafter.draft(progress_of({sequence_id: tokens}, limit, cost=0.001)).tokens.tolist()


@pytest.mark.parametrize("missed", [1, DEPTH, 3 * DEPTH])
def test_output_takes_no_more_room_than_its_blocks(missed):
    """Publishing starts and stops, since another request starts and finishes in every round."""
    with drafter_of(match_depth=DEPTH) as drafter:
        drafter.start(1, array([3]))
        held, rounds = drafter.corpus.nbytes, 600 // missed
        for turn in range(rounds):
            drafter.start(2, array([5]))
            draft(drafter, 1, [10 * turn], limit=0)
            drafter.finish(2, array([]), learn=False)
            draft(drafter, 1, np.arange(10_000, 10_000 + missed), limit=0)
            drafter.corpus.refresh()
        produced = rounds * (1 + missed)
        # One more block, and the prefix of each block.
        assert drafter.corpus.nbytes - held <= BYTES_PER_SLOT * (1.2 * produced + BLOCK)


@pytest.mark.parametrize("committed", [0, 2])
def test_output_from_before_others_started_is_drafted(committed):
    text = np.arange(15, dtype=np.uint32)
    given, first = text[:10], 10 - committed
    with drafter_of() as drafter:
        drafter.start(1, given[:first], committed=given[first:])
        draft(drafter, 1, text[10:13])
        drafter.start(2, given)
        draft(drafter, 1, text[13:])
        assert draft(drafter, 2) == text[10:].tolist()


@pytest.mark.parametrize(("missed", "is_drafted"), [(1, True), (PUBLISHED_AT_ONCE - 2, True), (600, False)])
@pytest.mark.parametrize("restarts", [False, True])
def test_long_output_from_before_others_started_is_left_out(missed, is_drafted, restarts):
    output = np.arange(10, 12 + missed)
    with drafter_of(match_depth=DEPTH) as drafter:
        drafter.start(1, array([1, 2, 3]))
        if restarts:  # Publishing has begun and ended before.
            drafter.start(3, array([9]))
            draft(drafter, 1, limit=0)
            drafter.finish(3, array([]), learn=False)
        draft(drafter, 1, output[:missed], limit=0)
        drafter.start(2, array([2, 3]))
        draft(drafter, 1, output[missed:], limit=0)
        assert draft(drafter, 2) == (output[:8].tolist() if is_drafted else [])
        # After the gap, output is drafted in any case.
        assert draft(drafter, 2, output[: missed + 1]) == output[missed + 1 :].tolist()


def test_what_is_published_by_many_is_merged_by_the_maintainer():
    corpus = Corpus(5000)
    corpus.maintain(0.001)
    with SuffixDrafter(DrafterConfig(capacity=5000), corpus=corpus) as drafter:
        for number in range(200):
            drafter.start(number, array([number]))
        batch = {number: range(1000 * number, 1000 * number + 9) for number in range(200)}
        done = threading.Event()
        merge, corpus.live.merge = corpus.live.merge, lambda: (merge(), done.set())
        drafter.draft(progress_of(batch, limit=0))
        assert done.wait(60)
        corpus.close()
        assert not corpus.live.is_waiting
        assert evidence(corpus.live).total() == 9 * 200


@pytest.mark.parametrize(
    "change",
    [lambda drafter: drafter.finish(1, array([]), learn=False), lambda drafter: drafter.forget_own("a")],
    ids=["finish", "forget"],
)
@pytest.mark.parametrize("rollout", [None, Rollout("problem", 1)])
def test_text_of_a_request_that_has_ended_is_not_drafted(change, rollout):
    with drafter_of() as drafter:
        drafter.start(1, array([1, 2, 3]), request_id="a", rollout=rollout)
        drafter.start(2, array([1, 2, 3]), rollout=rollout)
        draft(drafter, 1, [4, 5, 6], limit=0)
        assert draft(drafter, 2)[:3] == [4, 5, 6]
        change(drafter)
        assert not {*draft(drafter, 2)} & {4, 5, 6}


@given(st.lists(st.integers(0, 2), min_size=1, max_size=5), st.sampled_from(["path", "tree"]))
@examples(40)
def test_a_request_does_not_use_its_own_text_in_the_live_tier(output, shape):
    def drafts(is_published):
        with drafter_of([[0, 1, 2, 0, 0]], draft_shape=shape) as drafter:
            drafter.start(1, array([2, 1, 0]))
            if is_published:
                drafter.start(2, array([100]))
            drafter.draft(progress_of({1: output}, limit=0))
            assert (evidence(drafter.corpus.live).total() > 0) == is_published
            drafts = drafter.draft(progress_of({1: []}, limit=16, cost=0.001))
            return [drafts.tokens.tolist(), drafts.source.tolist(), drafts.accept_prob.tolist()]

    assert drafts(is_published=True) == drafts(is_published=False)
