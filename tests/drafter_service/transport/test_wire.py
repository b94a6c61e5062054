"""Messages and frames: equal after encoding and decoding, and refused if they are invalid."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    HEADER,
    LAST,
    MAX_MESSAGE_BYTES,
    MAX_STEP_TIMES,
    Frames,
    WireError,
    batch_message,
    check_batch,
    drafts_message,
    framed,
    last_frame,
    read_batch,
    read_drafts,
)
from ssd.types import DraftBatch, Path, Progress, Source, StepTime, offsets_of
from tests.strategies import LARGEST

step_times = st.lists(
    st.builds(
        StepTime,
        st.integers(0, LARGEST),
        st.integers(0, LARGEST),
        st.floats(allow_nan=False),
        st.floats(allow_nan=False),
    ),
    max_size=MAX_STEP_TIMES,
)
runs = st.lists(st.lists(st.integers(0, LARGEST), max_size=5), max_size=5)


def progress(committed, cost=None, steps=False):
    verified = np.arange(len(committed), dtype=np.uint32)
    return Progress(
        sequence_ids=np.arange(len(committed), dtype=np.uint64) + 2**63,
        tokens=np.array([token for run in committed for token in run], np.uint32),
        offsets=offsets_of(np.array([len(run) for run in committed], np.uint32)),
        verified=verified,
        max_draft=verified + 1,
        cost=cost,
        steps=verified + 2 if steps and committed else None,
    )


def assert_equal(left, right):
    for name, value in vars(left).items():
        if name == "step_times":
            assert [*getattr(right, name)] == [*value]
            continue
        if not isinstance(value, np.ndarray):
            assert getattr(right, name) == value, name
            continue
        assert getattr(right, name).dtype == value.dtype, name
        assert getattr(right, name).tolist() == value.tolist(), name


fractions = st.none() | st.floats(0, 1, exclude_min=True)


@given(runs, fractions, st.booleans(), fractions, step_times, st.integers(0, 99), st.integers(0, 99))
def test_progress_is_equal_after_encoding_and_decoding(committed, cost, steps, least, times, tokens, sequences):
    others = {"other_tokens": tokens, "other_sequences": sequences}
    sent = replace(progress(committed, cost, steps), min_path_prob=least, step_times=times, **others)
    received = pb.Batch.FromString(batch_message(sent).SerializeToString())
    assert_equal(sent, read_batch(received))
    check_batch(read_batch(received))


@given(runs)
def test_drafts_are_equal_after_encoding_and_decoding(drafted):
    paths = [Path(np.array(run, np.uint32), np.full(len(run), 0.25, np.float32), Source.LOCAL) for run in drafted]
    sent = DraftBatch.from_paths(paths)
    message = pb.Drafts.FromString(drafts_message(sent).SerializeToString())
    received, malformed = read_drafts(message, np.full(len(drafted), 5, np.uint32))
    assert_equal(sent, received)
    assert not malformed


def changed(**fields):
    message = batch_message(progress([[1, 2], [3]]))
    for name, value in fields.items():
        setattr(message, name, value)
    return message


u4 = lambda *values: np.array(values, "<u4").tobytes()  # noqa: E731

MALFORMED = {
    "ids cut short": (changed(sequence_ids=b"1234567"), "batch.sequence_ids has 7 bytes, not a multiple of 8"),
    "ids twice": (
        changed(sequence_ids=np.array([5, 5], "<u8").tobytes()),
        "batch: a sequence appears twice in the batch",
    ),
    "tokens cut short": (changed(tokens=b"123"), "batch.tokens has 3 bytes"),
    "a reserved token": (changed(tokens=u4(1, 0xFFFFFFFF, 2)), "batch.tokens holds the token id 4294967295"),
    "too few offsets": (changed(offsets=u4(0, 3)), "batch: offsets has 2 elements, not 3"),
    "decreasing offsets": (changed(offsets=u4(0, 4, 3)), "batch: offsets must not decrease"),
    "offsets from 1": (changed(offsets=u4(1, 2, 3)), "batch: offsets must not decrease"),
    "offsets beyond the tokens": (changed(offsets=u4(0, 2, 9)), "batch: offsets must not decrease"),
    "no offsets": (changed(offsets=b""), "batch: offsets has 0 elements"),
    "a cost of 0": (changed(cost=0.0), "greater than 0 and at most 1"),
    "a negative cost": (changed(cost=-0.1), "greater than 0 and at most 1"),
    "a cost above a step": (changed(cost=1.01), "greater than 0 and at most 1"),
    "a cost of NaN": (changed(cost=float("nan")), "greater than 0 and at most 1"),
    "an infinite cost": (changed(cost=float("inf")), "greater than 0 and at most 1"),
    "too many limits": (changed(max_draft=u4(1, 2, 3)), "batch: max_draft has 3 elements, not 2"),
    "too few steps": (changed(steps=u4(1)), "batch: steps has 1 elements, not 2"),
    "durations without numbers of tokens": (
        changed(step_tokens=u4(1, 2), step_sequences=u4(1), step_seconds=bytes(16)),
        "batch.step_sequences has 4 bytes, not 8",
    ),
    "fewer durations": (
        changed(step_tokens=u4(1, 2), step_sequences=u4(1, 1), step_seconds=bytes(8)),
        "batch.step_seconds has 8 bytes, not 16",
    ),
    "too many durations": (changed(step_tokens=bytes(4 * 65)), "batch.step_tokens has 65 elements; the maximum is 64"),
    "a path probability of 0": (changed(min_path_prob=0.0), "batch: min_path_prob must be greater than 0"),
    "too many steps": (changed(steps=u4(1, 0xFFFFFFFF)), "batch.steps holds 4294967295"),
}


@pytest.mark.parametrize(("message", "reason"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_batches_are_refused_by_field(message, reason):
    with pytest.raises(WireError, match=reason):
        check_batch(read_batch(message))


@given(st.binary(max_size=24), st.sampled_from(["sequence_ids", "tokens", "offsets", "verified", "max_draft"]))
def test_any_bytes_in_any_field_are_read_or_refused(data, field):
    try:
        read = read_batch(changed(**{field: data}))
        check_batch(read)
    except WireError:
        return
    assert read.offsets[-1] == len(read.tokens)
    assert len(read.sequence_ids) == len(read.offsets) - 1


def test_steps_without_durations_are_impossible_ones():
    [read] = read_batch(changed(step_tokens=u4(3), step_sequences=u4(1))).step_times
    assert read == StepTime(3, 1, 0.0)


def test_only_the_last_durations_are_sent():
    times = [StepTime(index + 1, 1, 0.1) for index in range(MAX_STEP_TIMES + 2)]
    assert read_batch(batch_message(replace(progress([[1]]), step_times=times))).step_times == times[2:]


def test_numbers_that_do_not_fit_become_impossible_ones():
    [read] = read_batch(batch_message(replace(progress([[1]]), step_times=[StepTime(-3, 1 << 40, 0.1)]))).step_times
    assert (read.tokens, read.sequences) == (0, LARGEST + 1)


def slow_frames(data):
    """Return all complete frames at the beginning, each with whether it is the last."""
    if len(data) < 4:
        return []
    length = int.from_bytes(data[:4], "little")
    size, is_last = length % (1 << 31), length >= 1 << 31
    return [(data[4 : 4 + size], is_last), *slow_frames(data[4 + size :])] if len(data) >= 4 + size else []


@given(st.lists(st.binary(max_size=40), max_size=8), st.booleans(), st.data())
def test_frames_are_found_for_any_split_of_the_bytes(messages, has_end, data):
    stream = b"".join(map(framed, messages)) + (last_frame(7, "no") if has_end else b"")
    whole = data.draw(st.integers(0, len(stream)))
    cuts = sorted(data.draw(st.lists(st.integers(0, whole), max_size=6)))
    frames, taken = Frames(), []
    for begin, end in zip([0, *cuts], [*cuts, whole], strict=True):
        taken += frames.feed(stream[begin:end])
    assert taken == slow_frames(stream[:whole])
    assert taken + frames.feed(stream[whole:]) == slow_frames(stream)


def test_the_last_frame_has_the_status():
    [(body, is_last)] = Frames().feed(last_frame(7, "not yours"))
    assert is_last
    assert pb.Error.FromString(body) == pb.Error(code=7, message="not yours")


@pytest.mark.parametrize("mark", [0, LAST])
def test_a_frame_that_is_too_long_is_refused_before_it_is_read(mark):
    longest = MAX_MESSAGE_BYTES
    assert Frames().feed(HEADER.pack(longest | mark)) == []
    with pytest.raises(WireError, match=f"a frame has {longest + 1} bytes; the maximum is {longest}"):
        Frames().feed(HEADER.pack(longest + 1 | mark))


def test_the_first_frame_may_have_a_limit_of_its_own():
    assert len(Frames(3).feed(framed(b"abc") + framed(b"abcd"))) == 2
    with pytest.raises(WireError, match="a frame has 4 bytes; the maximum is 3"):
        Frames(3).feed(framed(b"abcd"))
