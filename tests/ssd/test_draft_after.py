"""`draft_after` returns the drafts that a commit would return, and changes no later draft."""

import numpy as np
import pytest

from ssd import DrafterConfig, SuffixDrafter
from ssd.sequences.local_index import MIN_ROOM
from ssd.types import Progress, offsets_of
from tests.replay import progress_of

ARRAYS = ("tokens", "parents", "accept_prob", "source", "offsets")


def new_drafter(shape="path"):
    return SuffixDrafter(DrafterConfig(capacity=100_000, draft_shape=shape, max_draft=8, refresh_interval_s=3600))


def play(drafter, texts, steps, on_step=lambda _drafts: None):
    """Replay texts with a drafter; return its last drafts and the number of committed tokens of each text."""
    done = dict.fromkeys(texts, 10)
    for number, text in texts.items():
        drafter.start(number, text[:10])
    committed = {number: [] for number in texts}
    for _ in range(steps):
        drafts = drafter.draft(progress_of(committed, limit=6))
        on_step(drafts)
        for number, text in texts.items():
            committed[number] = text[done[number] : done[number] + 2]
            done[number] += 2
    return drafter.draft(progress_of(committed, limit=6)), done


def texts_of(seed, length=160):
    rng = np.random.default_rng(seed)
    return {number: (100 * number + rng.integers(0, 4, length)).astype(np.uint32) for number in range(3)}


def continuations_of(rng, texts, count):
    """Random runs of tokens, several per sequence, as `Progress`; and the runs."""
    numbers = rng.choice(list(texts), count)
    runs = [(100 * number + rng.integers(0, 4, rng.integers(1, 6))).astype(np.uint32) for number in numbers]
    progress = Progress(
        sequence_ids=numbers.astype(np.uint64),
        tokens=np.concatenate(runs),
        offsets=offsets_of(np.array([len(run) for run in runs])),
        verified=np.zeros(count, np.uint32),
        max_draft=rng.integers(0, 9, count).astype(np.uint32),
        cost=0.005,
    )
    return progress, runs


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("seed", range(2))
def test_drafts_after_continuations_equal_those_after_a_commit(shape, seed):
    texts, rng = texts_of(seed), np.random.default_rng(seed)
    with new_drafter(shape) as drafter:
        play(drafter, texts, steps=40)
        progress, runs = continuations_of(rng, texts, 12)
        found = drafter.draft_after(progress)
    for index, run in enumerate(runs):
        number, limit = int(progress.sequence_ids[index]), int(progress.max_draft[index])
        with new_drafter(shape) as twin:
            play(twin, texts, steps=40)
            # Without a last draft nothing is learned from the commit, as in `draft_after`.
            twin.draft(progress_of({each: [] for each in texts}, limit=0))
            expected = twin.draft(progress_of({number: run.tolist()}, limit=limit, cost=0.005))
        assert found.tokens_of(index).tolist() == expected.tokens.tolist()
        assert found.parents_of(index).tolist() == expected.parents.tolist()
        first, end = found.offsets[index : index + 2]
        assert found.accept_prob[first:end].tolist() == expected.accept_prob.tolist()
        assert found.source[first:end].tolist() == expected.source.tolist()
    assert len(found.tokens) > 10


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_drafting_after_continuations_changes_nothing(shape):
    """This includes continuations for which there is no room, which the length of the texts causes now and then."""
    texts, rng = texts_of(7, length=800), np.random.default_rng(7)
    with new_drafter(shape) as drafter, new_drafter(shape) as reference:
        last, _ = play(
            drafter, texts, steps=380, on_step=lambda _: drafter.draft_after(continuations_of(rng, texts, 4)[0])
        )
        expected, _ = play(reference, texts, steps=380)
        for name in ARRAYS:
            assert getattr(last, name).tolist() == getattr(expected, name).tolist()
        for own, other in zip(drafter.stats.counters, reference.stats.counters, strict=True):
            assert np.array_equal(own, other)
        # What was learned from the requests is the same as well.
        repeated = []
        for each in (drafter, reference):
            for number, text in texts.items():
                each.finish(number, np.empty(0, np.uint32))
                each.start(10 + number, text[:100])
            each.corpus.refresh()
            repeated.append(
                each.draft(progress_of({10 + number: texts[number][100:120].tolist() for number in texts}, limit=8))
            )
        assert repeated[0].accept_prob.tolist() == repeated[1].accept_prob.tolist()
        assert repeated[0].tokens.tolist() == repeated[1].tokens.tolist()
        assert len(repeated[0].tokens) > 5


def test_room_is_made_for_a_continuation():
    text = np.tile(np.arange(100, dtype=np.uint32), MIN_ROOM // 50)
    end = MIN_ROOM - 11
    with new_drafter() as drafter:
        drafter.start(1, text[:500])
        drafter.draft(progress_of({1: text[500:end]}, limit=8))
        drafts = drafter.draft_after(Progress.of_one(1, text[end : end + 3], max_draft=8))
    assert drafts.tokens.tolist() == text[end + 3 : end + 11].tolist()
