"""Prompts that a thread sorts while their sequences run."""

import logging
from concurrent.futures import CancelledError, Executor, Future, wait
from contextlib import suppress

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ssd import base
from ssd.base import LONG_PROMPT
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.drafter import SuffixDrafter
from ssd.sequences.local_index import FRESH_ROOM
from tests.replay import progress_of
from tests.ssd.sequences.test_local_index import assert_indexes, index_in
from tests.strategies import array, examples

CONFIG = DrafterConfig(capacity=50_000)
PROMPT = np.arange(10_000, 10_001 + LONG_PROMPT, dtype=np.uint32)


class HeldSorting(Executor):
    """Keeps the prompts that a drafter would sort in a thread until `run` sorts them."""

    def __init__(self, drafter):
        self._held = []
        drafter._sorter = self

    def submit(self, sort):
        self._held.append((Future(), sort))
        return self._held[-1][0]

    def run(self):
        """Sort the prompts, also those of sequences that have ended, as a thread that has begun does."""
        for future, sort in self._held:
            positions = sort()
            if not future.cancelled():
                future.set_result(positions)
        self._held.clear()

    def fail(self, problem):
        for future, _ in self._held:
            future.set_exception(problem)
        self._held.clear()


def new_drafter():
    return SuffixDrafter(CONFIG, corpus=Corpus.from_config(CONFIG), sorts_in_thread=True)


def draft_of(drafter, sequence_id, tokens=(), limit=3):
    return drafter.draft(progress_of({sequence_id: array(tokens)}, limit)).tokens.tolist()


@given(
    st.integers(0, 2**32),
    st.integers(0, 80),
    st.integers(2, 80),
    st.lists(st.integers(0, 90), max_size=12),
    st.integers(0, 12),
)
@examples(40)
@example(0, 70, 2, [FRESH_ROOM - 1, 1, 1, 1, 2 * FRESH_ROOM, 0, 1], 6)  # merged before it is sorted
@example(0, 0, 1000, [700, 1, 1], 2)  # moved before it is sorted
def test_tokens_of_steps_before_the_prompt_is_sorted_are_indexed_with_it(seed, earlier, size, steps, sorted_at):
    text = np.random.default_rng(seed).integers(0, 3, earlier + size + sum(steps)).astype(np.uint32)
    at = earlier + size
    with pytest.MonkeyPatch.context() as patch, new_drafter() as drafter:
        held = HeldSorting(drafter)
        drafter.start(1, text[:earlier], session_id="s")
        drafter.finish(1, array([]))
        patch.setattr(base, "LONG_PROMPT", 1)
        drafter.start(2, text[:at], session_id="s")
        assert drafter._unsorted
        for number, added in enumerate([*steps, 0]):
            if number == min(sorted_at, len(steps)):
                held.run()
            drafter.draft(progress_of({2: text[at : at + added]}, limit=added % 3))
            at += added
            assert index_in(drafter, 2).tokens.tolist() == text[:at].tolist()
        assert not drafter._unsorted
        assert_indexes(index_in(drafter, 2), text.tolist(), CONFIG.match_depth)


def test_drafts_come_from_the_corpus_until_the_prompt_is_sorted():
    with new_drafter() as drafter:
        held = HeldSorting(drafter)
        drafter.corpus.append(array([1, 2, 3, 4]))
        drafter.corpus.refresh()
        drafter.start(1, PROMPT, learn=False)
        assert draft_of(drafter, 1, PROMPT[500:505]) == []
        assert draft_of(drafter, 1, [1, 2]) == [3, 4]
        held.run()
        assert draft_of(drafter, 1, PROMPT[600:605]) == PROMPT[605:608].tolist()


def test_the_thread_sorts_prompts_for_the_next_draft():
    with new_drafter() as drafter:
        drafter.start(1, PROMPT)
        wait(drafter._unsorted.values(), timeout=60)
        assert draft_of(drafter, 1, PROMPT[500:505]) == PROMPT[505:508].tolist()
        [thread] = drafter._sorter._threads
    thread.join(60)
    assert not thread.is_alive()


def test_short_prompts_are_sorted_at_once():
    with new_drafter() as drafter:
        HeldSorting(drafter)
        drafter.start(1, PROMPT[:LONG_PROMPT])
        assert not drafter._unsorted
        assert draft_of(drafter, 1, PROMPT[500:505]) == PROMPT[505:508].tolist()
        # The new part of a turn is short as well.
        drafter.start(2, PROMPT[:LONG_PROMPT], session_id="s")
        drafter.finish(2, PROMPT[LONG_PROMPT:], learn=False)
        drafter.start(3, np.append(PROMPT, PROMPT[:5]), session_id="s")
        assert not drafter._unsorted


def test_a_sequence_may_end_before_its_prompt_is_sorted():
    with new_drafter() as drafter:
        held = HeldSorting(drafter)
        drafter.start(1, PROMPT, session_id="s")
        row = drafter.running.get(1).row
        draft_of(drafter, 1, [1, 2], limit=0)
        drafter.finish(1, array([3]))
        # Its row is used again, before the thread is done with the old prompt.
        drafter.start(2, array([7, 8, 7, 8]))
        assert drafter.running.get(2).row == row
        held.run()
        assert draft_of(drafter, 2) == [7, 8, 7]
        assert_indexes(index_in(drafter, 2), [7, 8, 7, 8], CONFIG.match_depth)
        drafter.corpus.refresh()
        drafter.start(3, array([1]))
        assert draft_of(drafter, 3) == [2, 3]
        assert drafter._idle.pop("s") is None


def test_the_next_turn_uses_a_prompt_that_was_sorted_after_the_last_draft():
    with new_drafter() as drafter:
        held = HeldSorting(drafter)
        drafter.start(1, PROMPT, session_id="s")
        held.run()
        drafter.finish(1, array([3]))
        assert_indexes(drafter._idle.pop("s").local, [*PROMPT.tolist(), 3], CONFIG.match_depth)


def test_a_prompt_that_cannot_be_sorted_is_not_searched(caplog):
    with new_drafter() as drafter:
        held = HeldSorting(drafter)
        drafter.start(1, PROMPT)
        held.fail(MemoryError("planted"))
        with caplog.at_level(logging.WARNING):
            assert draft_of(drafter, 1, PROMPT[500:505]) == []
        assert "a prompt is not searched, since it was not sorted: MemoryError" in caplog.text
        assert draft_of(drafter, 1, [7, 7]) == [7, 7, 7], "its output is"
        drafter.finish(1, array([]))


def test_closing_cancels_or_ends_the_sorting_of_prompts():
    drafter = new_drafter()
    drafter.start(1, np.arange(200_000, dtype=np.uint32))
    drafter.start(2, PROMPT)
    waited = [*drafter._unsorted.values()]
    drafter.close()
    for sorting in waited:
        with suppress(CancelledError):
            sorting.exception(timeout=60)
