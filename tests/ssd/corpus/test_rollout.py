"""Rollouts: their ranges, and their tags, which follow the text into the corpus."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd import Corpus, DraftBatch, DrafterConfig, Progress, SuffixDrafter
from ssd.corpus.rollout import MAX_GROUP_BYTES, MAX_VERSION, NO_TAG, Rollout


@pytest.mark.parametrize(
    ("group", "version", "message"),
    [
        ("", 0, "group must have 1 to 512 bytes, not 0"),
        ("é" * MAX_GROUP_BYTES, 0, "group must have 1 to 512 bytes, not 1024"),
        ("a\ud800", 0, "group must be text that has an encoding in UTF-8"),
        ("a", -1, "version must be 0 to 4294967295, not -1"),
        ("a", MAX_VERSION + 1, "version must be 0 to 4294967295"),
    ],
)
def test_ranges_are_checked(group, version, message):
    with pytest.raises(ValueError, match=message):
        Rollout(group, version)


@given(st.text("aé\U0001f600", min_size=1, max_size=20), st.integers(0, MAX_VERSION))
def test_a_tag_has_a_group_and_a_version_and_is_never_the_one_of_other_text(group, version):
    tag = Rollout(group, version).tag
    assert tag < 1 << 16
    assert tag & 255 == Rollout(group, 0).tag & 255 != NO_TAG
    assert tag >> 8 == version % 256


def first_drafts(asked):
    """Let two groups produce outputs; return the draft after their shared beginning for `asked`."""
    rng = np.random.default_rng(1)
    with SuffixDrafter(DrafterConfig(max_draft=4, cost=0.05), corpus=Corpus(8192)) as drafter:
        for number in range(120):
            group = number % 2
            output = np.array([*range(8), 50 + group, *rng.integers(60, 63, 4)], np.uint32)
            drafter.start(number, output[:4], rollout=Rollout(f"problem {group}", number // 4))
            draft = drafter.draft(Progress.of_one(number, output[4:8], max_draft=4))
            drafter.finish(number, output[8:], verified=len(draft.tokens))
            drafter.corpus.refresh()
        drafter.start(1000, np.arange(4, dtype=np.uint32), rollout=asked)
        return drafter.draft(Progress.of_one(1000, np.arange(4, 8, dtype=np.uint32), max_draft=4))


@pytest.mark.parametrize("group", [0, 1])
def test_drafts_follow_the_group(group):
    assert first_drafts(Rollout(f"problem {group}", 40)).tokens.tolist()[:1] == [50 + group]


def test_tags_of_others_do_not_change_drafts_of_other_requests():
    with_tags, without = (untagged(tagged) for tagged in (True, False))
    for name in ("tokens", "parents", "accept_prob", "source", "offsets"):
        assert getattr(with_tags, name).tolist() == getattr(without, name).tolist()


def untagged(tagged):
    """Return the drafts of requests without a rollout, over text that has tags or none."""
    rng = np.random.default_rng(2)
    with SuffixDrafter(DrafterConfig(max_draft=8, cost=0.02), corpus=Corpus(8192)) as drafter:
        for number in range(40):
            tag = Rollout(str(number % 3), number).tag if tagged else NO_TAG
            drafter.corpus.append(rng.integers(0, 4, 50).astype(np.uint32), tag=tag)
        drafter.corpus.refresh()
        drafts = []
        for number in range(40):
            text = rng.integers(0, 4, 30).astype(np.uint32)
            drafter.start(number, text[:10])
            drafts.append(drafter.draft(Progress.of_one(number, text[10:], max_draft=8)))
            drafter.finish(number, text[:3])
            drafter.corpus.refresh()
        return DraftBatch.concatenate(drafts)
