"""Frames compared with a slow reference, and invalid frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import HEADER, LAST, MAX_MESSAGE_BYTES, Frames, WireError, framed, last_frame


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
