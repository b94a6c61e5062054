"""Calls that every drafter refuses without an effect, and messages about drafters that fail."""

from dataclasses import replace
from itertools import chain, pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ssd import ClassicDrafter, DrafterConfig, SuffixDrafter
from ssd.corpus.corpus import Corpus
from ssd.errors import MAX_FAILURES, REPORT_INTERVAL_S, Failures
from ssd.types import PROPOSE_ID, Progress
from tests.naive import SEPARATOR
from tests.replay import progress_of
from tests.strategies import array

CONFIG = DrafterConfig(capacity=100_000)
TEXT = [5, 6, 7, 8, 5, 6, 7, 8, 5]
UINT32_FIELDS = ("tokens", "offsets", "verified", "max_draft")


def progress(**fields):
    return replace(progress_of({1: [6], 2: [6]}, limit=4), **fields)


PROGRESS = [
    ("4,294,967,294", {"tokens": array([6, SEPARATOR])}),
    ("sequence 9 was not started", {"sequence_ids": np.array([1, 9], np.uint64)}),
    ("twice", {"sequence_ids": np.array([1, 1], np.uint64)}),
    ("sequence 2 was offered 4 tokens; it cannot have verified 9", {"verified": array([2, 9])}),
    *(("cost", {"cost": cost}) for cost in (0.0, 1.01, float("nan"))),
    *(
        (f"^{field} must be a contiguous 1-D uint32 array, not ", {field: getattr(progress(), field).astype(dtype)})
        for field in UINT32_FIELDS
        for dtype in (np.int64, np.int32, np.uint64, np.float32, ">u4")
    ),
    *(
        (f"^{field} must be a .*array, not a list$", {field: getattr(progress(steps=array([1, 1])), field).tolist()})
        for field in ("sequence_ids", *UINT32_FIELDS, "steps")
    ),
    *(("^verified must be a contiguous", {"verified": counts}) for counts in (array([0] * 4)[::2], array([[0], [0]]))),
    *(
        (f"^{field} has {size} elements, not 2", {field: array([0] * size)})
        for field in ("verified", "max_draft", "steps")
        for size in (0, 1, 3)
    ),
    ("^steps must be a contiguous", {"steps": array([1, 0, 1, 0])[::2]}),
    *(("^offsets ", {"offsets": array(wrong)}) for wrong in ([0, 2], [0, 1, 1], [1, 1, 2], [0, 3, 2])),
]
"""Words of the error, and wrong fields of a step of sequences 1 and 2, which were offered four tokens each."""
OTHERS = [
    ("sequence 1 is already running", lambda drafter: drafter.start(1, array([1]))),
    *(
        (f"must be 0 to 18446744073709551614, not {number}", lambda drafter, n=number: drafter.start(n, array([1])))
        for number in (-1, PROPOSE_ID, PROPOSE_ID + 1)
    ),
    *(
        (word, lambda drafter, act=act, tokens=tokens: getattr(drafter, act[0])(act[1], tokens))
        for act in (("start", 3), ("finish", 1))
        for word, tokens in [
            ("4,294,967,294", array([SEPARATOR])),
            ("1-D uint32 array, not a list", [5]),
            *(
                ("1-D uint32 array", each)
                for each in (np.array([1, -1]), np.array([1.0]), array([[1]]), array([1]).astype(">u4"))
            ),
        ]
    ),
    *(("seed", lambda drafter, n=number: drafter.start(3, array([1]), seed=n)) for number in (1 << 63, -(1 << 63) - 1)),
    ("1-D uint32 array", lambda drafter: drafter.start(3, None)),
    ("sequence 8 was not started", lambda drafter: drafter.finish(8, array([]))),
    (
        "was offered 4 tokens; it cannot have verified 5",
        lambda drafter: drafter.finish(1, array([6, 5, 1, 1, 1]), verified=5),
    ),
    *(
        ("token|integers", lambda drafter, context=context: drafter.propose(context))
        for context in ([-1], [1 << 32], [1.5], [[1]], [SEPARATOR])
    ),
]
"""Words of the error, and other calls."""


def begin(drafter):
    """Start two private sequences, and draft four tokens for each."""
    for sequence_id in (1, 2):
        drafter.start(sequence_id, array(TEXT), learn=False)
    first = drafter.draft(progress_of({1: [], 2: []}, limit=4, cost=0.001))
    assert first.offsets.tolist() == [0, 4, 8]


def refuse_all(drafter):
    """Check that a drafter refuses all of these calls."""
    for word, fields in PROGRESS:
        with pytest.raises(ValueError, match=word):
            drafter.draft(progress(**fields))
    for word, call in OTHERS:
        with pytest.raises(ValueError, match=word):
            call(drafter)


def outcome(drafter):
    """Return the draft after the next step, as lists."""
    drafts = drafter.draft(progress_of({1: [6, 7], 2: [6, 9]}, limit=4, verified=4, cost=0.001))
    return [getattr(drafts, name).tolist() for name in ("tokens", "parents", "accept_prob", "source", "offsets")]


@pytest.mark.parametrize("kind", [SuffixDrafter, ClassicDrafter])
def test_a_refused_call_has_no_effect(kind):
    found = []
    for refuse in (lambda _: None, refuse_all):
        with kind(CONFIG, corpus=Corpus.from_config(CONFIG)) as drafter:
            drafter.corpus.append(array([*TEXT, 6, 7, 1, 1]))  # The baseline drafts from the corpus alone.
            drafter.corpus.refresh()
            begin(drafter)
            refuse(drafter)
            drafter.corpus.refresh()
            counted = [counter.tolist() for counter in drafter.stats.counters]
            found.append([outcome(drafter), counted, drafter.corpus.tokens])
            drafter.finish(1, array([6]), verified=0)
            drafter.start(1, array([7, 8, 7]))
            assert drafter.draft(progress_of({1: []}, limit=1)).tokens.tolist() == [8]
    assert found[0] == found[1]


def test_continuations_are_refused_like_steps():
    with SuffixDrafter(CONFIG, corpus=Corpus.from_config(CONFIG)) as drafter:
        begin(drafter)
        # Several continuations may be of one sequence.
        for word, fields in [each for each in PROGRESS if "sequence_ids" not in each[1]]:
            with pytest.raises(ValueError, match="offered 0 tokens" if "offered" in word else word):
                drafter.draft_after(progress(**fields))
        with pytest.raises(ValueError, match="sequence 9 was not started"):
            drafter.draft_after(progress_of({9: [1]}, limit=2))
        assert len(drafter.draft_after(progress_of({}, limit=2))) == 0


def test_read_only_slices_are_accepted():
    wanted = progress_of({1: [5], 2: [6]}, limit=4)
    for name in ("tokens", "offsets", "verified", "max_draft"):
        own = getattr(wanted, name)
        part = np.concatenate([own, own])[len(own) :]
        part.flags.writeable = False
        replace(wanted, **{name: part}).check_arrays()


@given(st.integers(0, 4), st.lists(st.integers(0, 6), max_size=6), st.integers(0, 6))
def test_offsets_are_accepted_only_if_they_partition_the_tokens(sequences, offsets, tokens):
    counts = array([0] * sequences)
    ids = np.arange(sequences, dtype=np.uint64)
    wanted = Progress(ids, array([1] * tokens), array(offsets), counts, counts)
    runs = [range(first, end) for first, end in pairwise(offsets)]
    is_partition = offsets[:1] == [0] and list(chain(*runs)) == list(range(tokens))
    if len(offsets) == sequences + 1 and is_partition and offsets == sorted(offsets):
        wanted.check_arrays()
    else:
        with pytest.raises(ValueError, match=r"^offsets "):
            wanted.check_arrays()


def test_failures_are_reported_once_a_minute_with_their_number():
    now = 5.0
    failures = Failures(clock=lambda: now)
    assert failures.add() == "continuing without its drafts"
    assert [failures.add(), failures.add(2)] == [None, None]
    now += REPORT_INTERVAL_S
    assert failures.add() == "continuing without its drafts (4 failures since the last message)"
    assert failures.add() is None
    assert failures.count == 6


def test_drafting_ends_after_failures_in_a_row():
    failures = Failures(clock=lambda: 0.0)
    for _ in range(2):
        assert not any("off" in (failures.add() or "") for _ in range(MAX_FAILURES - 1))
        failures.succeeded()
    messages = [failures.add() for _ in range(MAX_FAILURES + 5)]
    assert [at for at, message in enumerate(messages, 1) if message is not None] == [MAX_FAILURES]
    assert "restarted" in messages[MAX_FAILURES - 1]
    failures.succeeded()
    assert failures.is_off
