"""The fields of requests: read, or refused with an error that names the field."""

import numpy as np
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.server.calls import parsed
from drafter_service.server.requests import (
    has_few_fields,
    read_finish,
    read_model,
    read_padding,
    read_start,
    read_texts,
)
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_NAME_BYTES, MAX_STEPS, MAX_TEXTS, WireError, pack
from ssd.budget.padding import Padding
from ssd.corpus.rollout import Rollout
from tests.drafter_service.raw import start, texts
from tests.strategies import array

LONG_NAME = "n" * (MAX_NAME_BYTES + 1)
SEPARATOR = b"\xff" * 4


def hello_of(sizes, lengths):
    return pb.Hello(step_sizes=pack(array(sizes), "u4"), draft_lengths=pack(array(lengths), "u4"))


def test_the_shapes_that_an_engine_pads_to_are_read():
    assert read_padding(hello_of([1, 8, 16], [0, 4])) == Padding((1, 8, 16), (0, 4))


def test_a_start_is_read():
    read = read_start(start(7, [1, 2], committed=pack(array([3]), "u4"), rollout=pb.Rollout(group="a", version=3)), 0)
    assert {name: text.tolist() for name, text in read.texts.items()} == {
        "prompt": [1, 2],
        "hints": [],
        "committed": [3],
    }
    assert (read.size, read.rollout) == (3, Rollout("a", 3))
    assert read_start(pb.Start(), 0).rollout is None


@pytest.mark.parametrize(
    ("read", "message"),
    [
        (lambda: read_start(pb.Start(prompt=b"12345"), 3), r"starts\[3\]\.prompt has 5 bytes, not a multiple of 4"),
        (lambda: read_start(pb.Start(committed=SEPARATOR), 0), r"starts\[0\]\.committed holds the token id 4294967295"),
        (
            lambda: read_start(pb.Start(rollout=pb.Rollout(group="a" * 10_240)), 1),
            r"starts\[1\]\.rollout: group must have 1 to 512 bytes, not 10240",
        ),
        (
            lambda: read_start(pb.Start(session_id=LONG_NAME), 0),
            r"starts\[0\]\.session_id has 513 characters; the",
        ),
        (lambda: read_start(pb.Start(request_id=LONG_NAME), 0), r"starts\[0\]\.request_id has 513"),
        (lambda: read_finish(pb.Finish(tokens=SEPARATOR), 1), r"finishes\[1\]\.tokens holds the token id 4294967295"),
        (lambda: read_finish(pb.Finish(steps=MAX_STEPS + 1), 1), r"finishes\[1\]\.steps is 1048577"),
        (lambda: read_model(pb.Model(name=LONG_NAME)), r"model\.name has 513"),
        (lambda: read_model(pb.Model(tokenizer=LONG_NAME)), r"model\.tokenizer has 513"),
        (lambda: read_model(pb.Model(adapter=LONG_NAME)), r"model\.adapter has 513"),
        (lambda: read_padding(hello_of([2, 1], [])), r"hello\.step_sizes must be ascending"),
        (lambda: read_padding(hello_of([], [1, 1])), r"hello\.draft_lengths must be ascending"),
        (lambda: read_padding(hello_of(range(5000), [])), r"hello\.step_sizes has 5000 elements; the maximum is"),
        (lambda: read_padding(pb.Hello(step_sizes=b"123")), r"hello\.step_sizes has 3 bytes"),
    ],
)
def test_a_refusal_names_the_field(read, message):
    with pytest.raises(WireError, match=message):
        read()


def with_prompts(lengths, message):
    message.prompt_lengths = pack(array(lengths), "u4")
    return message


def test_texts_are_read():
    read = read_texts(texts([1, 2], [], [3], names=["a", "", "b"]), vocab_size=4)
    assert [(each.tokens.tolist(), each.request_id) for each in read] == [([1, 2], "a"), ([], None), ([3], "b")]
    [one] = read_texts(texts([1]), vocab_size=0)
    assert (one.request_id, one.prompt_length) == (None, 0)
    both = read_texts(with_prompts([1, 0], texts([1, 2], [3])), vocab_size=0)
    assert [each.prompt_length for each in both] == [1, 0]
    assert not [*read_texts(texts(), vocab_size=0)]


@pytest.mark.parametrize(
    ("message", "problem"),
    [
        (texts([1, 4]), "texts.tokens holds the id 4; the vocabulary has 4 tokens"),
        (texts([1], names=["a", "b"]), "texts.request_ids has 2 elements, not 1"),
        (texts([1], names=[LONG_NAME]), r"texts.request_ids\[0\] has 513 characters"),
        (pb.Texts(tokens=SEPARATOR, offsets=bytes(4)), "texts.tokens holds the token id 4294967295"),
        (pb.Texts(tokens=bytes(4)), "texts.offsets must increase from 0 to 1, the number of elements"),
        (pb.Texts(tokens=bytes(4), offsets=bytes(4)), "texts.offsets must increase"),
        (pb.Texts(offsets=pack(array([1]), "u4")), "texts.offsets must increase"),
        (pb.Texts(tokens=bytes(8), offsets=pack(array([0, 2, 1, 2]), "u4")), "texts.offsets must increase"),
        (pb.Texts(tokens=bytes(8), offsets=pack(array([0, 3, 2]), "u4")), "texts.offsets must increase"),
        (pb.Texts(offsets=b"123"), "texts.offsets has 3 bytes"),
        (with_prompts([1], texts([1, 2], [3])), "texts.prompt_lengths has 1 elements, not 2"),
        (with_prompts([1, 2], texts([1, 2], [3])), r"texts.prompt_lengths\[1\] is 2; the text has 1 tokens"),
        (pb.Texts(prompt_lengths=b"123"), "texts.prompt_lengths has 3 bytes"),
        (pb.Texts(times=bytes(8)), "texts.times has 1 elements, not 0"),
        (pb.Texts(tags=bytes(3)), "texts.tags has 3 bytes"),
        (pb.Texts(offsets=bytes(8), tags=pack(array([1 << 16]), "u4")), "texts.tags holds 65536; a tag has 16 bits"),
    ],
)
def test_inconsistent_texts_are_refused(message, problem):
    with pytest.raises(WireError, match=problem):
        read_texts(message, vocab_size=4)


@given(st.binary(max_size=40), st.binary(max_size=20), st.lists(st.sampled_from(["", "a"]), max_size=3))
def test_any_texts_are_read_or_refused(tokens, offsets, names):
    try:
        read = read_texts(pb.Texts(tokens=tokens, offsets=offsets, request_ids=names), vocab_size=1 << 31)
    except WireError:
        return
    assert sum(len(each.tokens) for each in read) == len(tokens) // 4


@st.composite
def requests(draw):
    """Generate requests with any fields, and their number of fields."""
    starts = draw(st.integers(0, 5))
    finishes = draw(st.integers(0, 5))
    has_batch, step = draw(st.booleans()), draw(st.integers(0, 1 << 63))
    request = pb.DraftRequest(
        step=step,
        starts=[start(draw(st.integers(0, 1 << 40)), [1] * draw(st.integers(0, 50))) for _ in range(starts)],
        finishes=[pb.Finish() for _ in range(finishes)],
        batch=pb.Batch(sequence_ids=bytes(8), cost=0.5) if has_batch else None,
    )
    return request, starts + finishes + has_batch + (step != 0)


@given(requests(), st.integers(0, 12))
def test_fields_are_counted_without_parsing(request_and_fields, limit):
    request, fields = request_and_fields
    assert has_few_fields(request.SerializeToString(), limit) == (fields <= limit)


@given(st.binary(max_size=80))
def test_no_message_has_more_sequences_than_fields_were_counted(data):
    try:
        request = pb.DraftRequest.FromString(data)
    except DecodeError:
        has_few_fields(data, 3)
        return
    sequences = len(request.starts) + len(request.finishes)
    assert has_few_fields(data, sequences - 1) is False or sequences == 0


def test_many_empty_sequences_are_counted_before_parsing():
    assert not has_few_fields(b"\x1a\x00" * 5000, 4999)
    in_a_group = b"\x7b" + b"\x7c"  # Of an unknown field.
    assert not has_few_fields(in_a_group + b"\x1a\x00" * 5000, 4999)
    assert has_few_fields(b"\x1a\x00" * 5000, 5000)
    assert has_few_fields(pb.DraftRequest(starts=[start(1, np.zeros(100_000))]).SerializeToString(), 1)


def observed(*names, padding=0, prefix=b""):
    """Return a serialized ObserveRequest; padding: size of its tokens."""
    message = pb.Texts(tokens=bytes(padding), offsets=bytes(8), request_ids=names)
    return prefix + pb.ObserveRequest(namespace="n", model=pb.Model(name="m"), texts=message).SerializeToString()


@pytest.mark.parametrize(
    "data",
    [
        observed(*[""] * 100),
        observed(*["name"] * 100, padding=5000),
        observed(*[b"\x1a\x00".decode() * 50] * 100),
        observed(*["a"] * 60) + observed(*["a"] * 40),  # One message for a parser, too.
        observed(*["a"] * 100, prefix=b"\x7a\x00"),  # An unknown field.
    ],
)
def test_names_of_texts_are_counted_without_parsing(data):
    request = pb.ObserveRequest.FromString(data)
    fields = 1 + len(request.ListFields()) + len(request.texts.request_ids) + 2 + 5
    assert has_few_fields(data, fields, within=3)
    assert not has_few_fields(data, len(request.texts.request_ids), within=3)


def test_too_many_texts_are_refused_before_they_are_read():
    refusal = "texts holds more than 65,536 texts; send them in several messages"
    parsed(pb.ObserveRequest, observed(*["a"] * MAX_TEXTS))
    with pytest.raises(WireError, match=refusal):
        parsed(pb.ObserveRequest, observed(*["a"] * (MAX_TEXTS + 100)))
    parsed(pb.ForgetRequest, observed(*["a"] * (MAX_TEXTS + 100)))
    assert len([*read_texts(pb.Texts(offsets=bytes(4 * MAX_TEXTS + 4)), 0)]) == MAX_TEXTS
    with pytest.raises(WireError, match=refusal):
        read_texts(pb.Texts(offsets=bytes(4 * MAX_TEXTS + 8)), 0)
