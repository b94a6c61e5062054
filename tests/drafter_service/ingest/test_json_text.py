"""JSON in each layout, whole and broken."""

import json
import tracemalloc

import orjson
import pytest

from drafter_service.ingest import containers, json_text
from drafter_service.ingest.containers import read_batches
from drafter_service.ingest.documents import MAX_PLACES, NO_TOKENIZER
from drafter_service.ingest.files import list_files
from drafter_service.ingest.json_text import JSON_CUT, JSON_TOO_LONG, NOT_JSON, NOT_UTF8
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sessions import Unread
from tests.drafter_service.ingest.loads import (
    RECORDS,
    REFUSED,
    documents_in,
    outputs_in,
    small,
)

ONE, TWO = {"completion": "one"}, {"completion": "two", "rest": {"a": [1, {"completion": "no"}], "b": '[{\\"'}}
CHAT = [{"role": "user", "content": "why"}, {"role": "assistant", "content": "one"}]
PRETTY = json.dumps(TWO, indent=2)
LINE = json.dumps(ONE)
CHUNK = '{"object": "chat.completion.chunk", "choices": [{"delta": {"content": "%s"}}]}'


def test_bad_lines_are_counted_with_places_but_without_content(tmp_path):
    good = orjson.dumps(RECORDS[0])
    lines = [b'{"secret', good, b"", b"[1]", b"\xff\xfe", b'{"text": "secret"}', good, b'{"token_ids": [-1]}']
    lines += [b"nonsense"] * 10
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join(lines))
    documents, reading = documents_in(path, reading=small())
    assert list(documents) == [f"{path}:2", f"{path}:7"]
    by_reason = reading.faults.by_reason
    assert by_reason[NOT_JSON].count == 12
    assert by_reason[NOT_JSON].places == [f"{path}:{line}" for line in (1, 5, 9)]
    assert len(by_reason[NOT_JSON].places) == MAX_PLACES
    assert by_reason[NO_TOKENIZER].places == [f"{path}:6"]
    assert reading.faults.count == 15
    assert "secret" not in str(by_reason)


def test_very_long_lines_are_skipped_without_keeping_them_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "MAX_JSON", 4000)
    good = orjson.dumps(RECORDS[0])
    path = tmp_path / "a.jsonl"
    path.write_bytes(b"\n".join([good, b'{"text": "' + b"x" * 50_000 + b'"}', good, good]) + b"\n")
    documents, reading = documents_in(path, reading=small())
    assert list(documents) == [f"{path}:1", f"{path}:3", f"{path}:4"]
    assert reading.faults.by_reason[JSON_TOO_LONG].places == [f"{path}:2"]


@pytest.mark.parametrize("suffix", [".json", ".log", ".txt", ".jsonl", ""])
@pytest.mark.parametrize(
    ("content", "outputs"),
    [
        (json.dumps([ONE, TWO]), ["one", "two"]),
        (json.dumps([ONE, TWO], indent=4), ["one", "two"]),
        (f"[\n{LINE},\n{LINE}\n]\n", ["one", "one"]),
        (f"[{LINE},\n {LINE}]\n", ["one", "one"]),
        (f"[\n{LINE}\n,\n{LINE}\n]\n", ["one", "one"]),
        (f"[{LINE}]\n[{LINE}, {LINE}]\n", ["one", "one", "one"]),
        (f"{LINE}\n[{LINE}, {LINE}]\n", ["one", "one", "one"]),
        (f"[[{LINE}], [{LINE}]]", ["one", "one"]),
        (PRETTY, ["two"]),
        (PRETTY + PRETTY + "\n" + PRETTY, ["two"] * 3),
        (LINE, ["one"]),
        (LINE * 3, ["one"] * 3),
        (f"{LINE},\n{LINE},\n", ["one", "one"]),
        (f"{LINE}\r\n{LINE}", ["one", "one"]),
        (f"\n\n# a comment\n{LINE}\n\n{LINE}", ["one", "one"]),
        (f"# header\n{PRETTY}", ["two"]),
        ('{"completion": "one", "p": NaN}\n{"completion": "two", "p": -Infinity}', ["one", "two"]),
        ('[{"completion": "one", "p": NaN},\n{"completion": "two", "p": Infinity}]', ["one", "two"]),
        ('{"completion": "a \\ud83d b \\\\ud83d \\ud83e\\udd84"}\n' + LINE, ["a \ufffd b \\ud83d 🦄", "one"]),
        ('[{"completion": "a \\udc00"}]', ["a \ufffd"]),
        (f"10:00 INFO [x.py:3] call {{}} {LINE} took 3 s\n10:01 INFO {LINE}\n", ["one", "one"]),
        (f"event: a\nid: 1\ndata: {LINE}\n\n: ping\n\ndata:{LINE}\n\ndata: [DONE]\n", ["one", "one"]),
        (json.dumps(CHAT), ["one"]),
        (json.dumps([CHAT, CHAT], indent=1), ["one", "one"]),
        (json.dumps({"version": 1, "runs": [ONE, ONE]}, indent=1), ["one", "one"]),
    ],
)
def test_layouts_of_json(tmp_path, suffix, content, outputs):
    path = tmp_path / f"a{suffix}"
    for data in (content.encode(), content.encode("utf-8-sig"), content.encode("utf-16"), content.encode("utf-16-be")):
        path.write_bytes(data)
        assert outputs_in(path) == (outputs, {})


@pytest.mark.parametrize(
    ("content", "outputs", "faults"),
    [
        (f"{LINE}\n{LINE[:12]}", ["one"], {JSON_CUT: 1}),
        (f"{LINE}\n{LINE[:12]}\n{LINE}\n", ["one", "one"], {NOT_JSON: 1}),
        (f"{LINE[:12]}\n{LINE}\n{LINE}\n", ["one", "one"], {NOT_JSON: 1}),
        ('{"request": {"completion": "x"}, "a": \n' + f"{LINE}\n{LINE}\n", ["one", "one"], {NOT_JSON: 1}),
        (f"[{LINE}, {LINE[:-3]}", ["one"], {JSON_CUT: 1}),
        (f"[{LINE}, {LINE},", ["one", "one"], {JSON_CUT: 1}),
        (json.dumps([ONE, TWO, TWO], indent=2)[:-40], ["one", "two"], {JSON_CUT: 1}),
        (PRETTY + PRETTY[:-9], ["two"], {JSON_CUT: 1}),
        (f"[\n{LINE},\n{LINE[:12]},\n{LINE}\n]", ["one", "one"], {NOT_JSON: 1}),
        (f"[\n{LINE},\nnonsense,\n{LINE}\n]", ["one", "one"], {NOT_JSON: 1}),
        (json.dumps([ONE, TWO, ONE], indent=2).replace('"a":', "a"), ["one", "one"], {NOT_JSON: 1}),
        (
            json.dumps({"n": 1, "x": {"y": [{}]}, "runs": [ONE, ONE, ONE]}, indent=1)[:-20],
            ["one", "one"],
            {JSON_CUT: 1},
        ),
        (f"{CHUNK % 'o'}\n{CHUNK[:60]}\n{CHUNK % 'e'}\n{LINE}\n", ["one"], {NOT_JSON: 1, REFUSED: 1}),
        (f"[{CHUNK % 'o'},\n{CHUNK[:60]}\n{CHUNK % 'e'},\n{LINE}]", ["one"], {NOT_JSON: 1, REFUSED: 1}),
        (f"{CHUNK % 'o'}\nINFO a token\n{CHUNK % 'ne'}\n", ["one"], {NOT_JSON: 1}),
        (b'[{"completion": "\xff"}, {"completion": "one"}]', ["one"], {NOT_UTF8: 1}),
        (b'{"completion": "\xff"}\n{"completion": "one"}\n', ["one"], {NOT_UTF8: 1}),
    ],
)
def test_broken_json_is_read_as_far_as_it_is_complete(tmp_path, content, outputs, faults):
    path = tmp_path / "a.log"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    assert outputs_in(path) == (outputs, faults)


def test_a_cut_conversation_keeps_its_complete_messages(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"id": 1, "messages": [*CHAT, *CHAT]}, indent=1)[:-30])
    records = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(containers, "read_records", lambda found, *_: records.extend(found) or [])
        outputs_in(tmp_path / "a.json")
    assert [record.value for record in records] == [[*CHAT, CHAT[0]], Unread(JSON_CUT, breaks_streams=False)]


def test_an_object_of_which_nothing_can_be_read_is_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "MAX_JSON", 2000)
    (tmp_path / "a.json").write_text(json.dumps(dict.fromkeys("abcdefgh", "x" * 1500)))
    _, reading = documents_in(tmp_path / "a.json", reading=small())
    assert list(reading.faults.by_reason) == [JSON_TOO_LONG]


def test_memory_for_an_array_does_not_grow_with_it(tmp_path, monkeypatch):
    monkeypatch.setattr(json_text, "MAX_JSON", 1 << 17)
    record = json.dumps({"completion": "x" * 10_000})
    for name, layout in {
        "line.json": "[{}]",
        "lines.json": "[\n{}\n]",
        "runs.json": '{{"n": 1, "runs": [{}]}}',
    }.items():
        (tmp_path / name).write_text(layout.format(", ".join([record] * 400)))
        tracemalloc.start()
        reading = Reading(block_bytes=1 << 16)
        batches = read_batches(list_files([str(tmp_path / name)]), reading)
        assert sum(len(batch.items) for batch in batches) == 400
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert reading.faults.by_reason == {}
        assert peak < 3 << 19 < (tmp_path / name).stat().st_size / 2
