"""Finding outputs and prompts in records."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.ingest.chats import Chat, Reply
from drafter_service.ingest.documents import Faults, Item, RecordError
from drafter_service.ingest.formats import Record, read_records
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.records import BAD_IDS, KNOWN, NO_FIELD, NO_OUTPUT, NOT_A_RECORD, find_outputs

USER, ANSWER = {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "Because."}
CHOICES = [{"index": 0, "message": ANSWER}]


def seen(record, fields=()):
    """Return (prompt, output) of each output, as plain values."""
    return [(plain(found.prompt), plain(found.output)) for found in find_outputs(record, fields)]


def plain(part):
    if isinstance(part, np.ndarray):
        assert part.dtype == np.uint32
        return part.tolist()
    return [message["content"] for message in part.messages] if isinstance(part, Chat) else part


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"request": {"messages": [USER]}, "response": {"choices": CHOICES}}, [(["Why?"], "Because.")]),
        ({"messages": [USER], "choices": CHOICES}, [(["Why?"], "Because.")]),
        (
            {
                "custom_id": "1",
                "request": {"body": {"messages": [USER]}},
                "response": {"status_code": 200, "body": {"choices": CHOICES}},
            },
            [(["Why?"], "Because.")],
        ),
        ({"custom_id": "1", "response": {"body": {"choices": CHOICES}}, "error": None}, [(None, "Because.")]),
        ({"body": {"messages": [USER]}, "response": {"body": {"choices": CHOICES}}}, [(["Why?"], "Because.")]),
        (
            {"request": json.dumps({"messages": [USER]}), "response": json.dumps({"choices": CHOICES})},
            [(["Why?"], "Because.")],
        ),
        ({"request": {"prompt": "p"}, "response": {"choices": [{"text": "t"}]}}, [("p", "t")]),
        ({"prompt": "p", "choices": [{"text": "t"}, {"text": "u"}]}, [("p", "t"), ("p", "u")]),
        ({"prompt": ["p", "q"], "choices": [{"text": "t", "index": 0}, {"text": "u", "index": 1}]},
         [("p", "t"), ("q", "u")]),
        ({"prompt": ["p", "q"], "choices": [{"text": x, "index": i} for i, x in enumerate("tuvw")]},
         [("p", "t"), ("p", "u"), ("q", "v"), ("q", "w")]),
        ({"prompt": [5, 6], "choices": [{"text": "t"}]}, [([5, 6], "t")]),
        ({"prompt": [[5, 6]], "choices": [{"text": "t"}]}, [([5, 6], "t")]),
        ({"prompt": "p", "choices": [{"text": "t", "token_ids": [1, 2], "prompt_token_ids": [3]}]}, [([3], [1, 2])]),
        ({"prompt_token_ids": [3], "choices": [{"message": ANSWER, "token_ids": [1, 2]}]}, [([3], [1, 2])]),
        ({"messages": [USER, ANSWER]}, [(["Why?"], "Because.")]),
        ({"messages": [USER, ANSWER, USER, ANSWER]},
         [(["Why?"], "Because."), (["Why?", "Because.", "Why?"], "Because.")]),
        ({"messages": [ANSWER]}, [(None, "Because.")]),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [(["a"], "b")]),
        ({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "image_url"}]}],
          "choices": CHOICES}, [([[{"type": "text", "text": "a"}]], "Because.")]),
        ({"messages": [USER], "response": "r"}, [(["Why?"], "r")]),
        ({"prompt": [USER], "completion": [ANSWER]}, [(["Why?"], "Because.")]),
        ({"prompt": "p", "completion": "c"}, [("p", "c")]),
        ({"prompt": "p", "response": "c"}, [("p", "c")]),
        ({"input": "p", "output": "c"}, [("p", "c")]),
        ({"question": "p", "answer": "c"}, [("p", "c")]),
        ({"completion": "c"}, [(None, "c")]),
        ({"text": "t", "meta": {}}, [(None, "t")]),
        ({"prompt_token_ids": [1], "token_ids": [2, 3]}, [([1], [2, 3])]),
        ({"prompt_token_ids": [1], "completion_token_ids": [2]}, [([1], [2])]),
        ({"input_ids": [1], "output_ids": [2]}, [([1], [2])]),
        ({"input_ids": [1, 2]}, [(None, [1, 2])]),
        ({"tokens": [4_294_967_294, 0]}, [(None, [4_294_967_294, 0])]),
        ({"prompt": "p", "completion": "c", "token_ids": [2]}, [(None, [2])]),
    ],
)  # fmt: skip
def test_known_formats_are_read(record, expected):
    assert seen(record) == expected
    assert set(record) & KNOWN, "Parquet files would not read these columns"


@pytest.mark.parametrize(
    ("record", "reason"),
    [
        ([1, 2], NOT_A_RECORD),
        ("text", NOT_A_RECORD),
        ({}, NO_OUTPUT),
        ({"messages": [USER]}, NO_OUTPUT),
        ({"text": ""}, NO_OUTPUT),
        ({"custom_id": "1", "response": None, "error": {"code": "x"}}, NO_OUTPUT),
        ({"choices": [{"message": {"role": "assistant", "content": None}}]}, NO_OUTPUT),
        ({"token_ids": []}, NO_OUTPUT),
        ({"token_ids": [1, -1]}, BAD_IDS),
        ({"token_ids": [4_294_967_295]}, BAD_IDS),
        ({"token_ids": [1.5]}, BAD_IDS),
        ({"token_ids": [1, None]}, BAD_IDS),
    ],
)
def test_other_records_are_refused_with_a_reason(record, reason):
    with pytest.raises(RecordError) as problem:
        find_outputs(record)
    assert str(problem.value) == reason


def test_configured_fields_are_read():
    record = {"a": {"b": "deep"}, "c.d": "dotted", "ids": [7], "response": "unused"}
    assert seen(record, ("a.b",)) == [(None, "deep")]
    assert seen(record, ("c.d",)) == [(None, "dotted")]
    assert seen(record, ("a.b", "c.d", "ids")) == [("deep\ndotted", [7])]
    for missing in (("x",), ("a",), ("a.b.c",), ("x", "ids")):
        with pytest.raises(RecordError, match=NO_FIELD):
            find_outputs(record, missing)


def test_requests_keep_their_names():
    """Record numbers of a log are not used as names, since other files have the same numbers."""

    def names(record):
        return [found.request for found in find_outputs(record)]

    assert names({"response": {"id": "chatcmpl-1", "choices": CHOICES}}) == ["chatcmpl-1"]
    assert names({"request_id": "r", "id": "cmpl-1", "choices": CHOICES}) == ["r"]
    assert names({"custom_id": "request-1", "response": {"body": {"choices": CHOICES}}}) == [None]
    assert names({"id": 1, "text": "t"}) == [None]


def test_tool_calls_are_kept_for_the_chat_template():
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "it"}'}}
    (found,) = find_outputs({"messages": [USER], "choices": [{"message": {"role": "assistant", "tool_calls": [call]}}]})
    assert isinstance(found.output, Reply)
    assert found.output.message["tool_calls"] == [call]


def test_reasoning_is_part_of_the_output():
    message = {"role": "assistant", "reasoning_content": "Hm.", "content": "Yes."}
    assert seen({"choices": [{"message": message}]}) == [(None, "Hm.\n\nYes.")]


def items_of(value, reading):
    return [item for read in read_records([Record(value, "a.jsonl:1")]) for item in reading.items_of(read)]


LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
INNER = {"role", "content", "message", "function", "arguments", "name", "tool_calls", "index", "from", "value"}
NAMES = st.sampled_from(sorted(KNOWN | INNER))
VALUES = st.recursive(
    LEAVES | st.lists(st.integers(-1, 1 << 32), max_size=4) | st.sampled_from([USER, ANSWER, [USER, ANSWER], CHOICES]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES, inner, max_size=5),
    max_leaves=12,
)


@given(value=VALUES)
def test_any_value_is_read_or_counted(value):
    reading = Reading(faults=Faults())
    items = items_of(value, reading)
    assert items or reading.faults.count
    for item in items:
        assert isinstance(item, Item)


@given(value=VALUES)
def test_any_value_is_read_or_counted_with_a_tokenizer(value, vocabulary):
    reading = Reading(vocabulary=vocabulary, faults=Faults())
    items = items_of(value, reading)
    assert items or reading.faults.count
    for item in items:
        assert isinstance(item.output, str | np.ndarray)
        assert isinstance(item.prompt, str | np.ndarray | None)
