"""Reading each container."""

import bz2
import gzip
import io
import json
import lzma
import os
import threading
import zipfile

import fsspec
import numpy as np
import orjson
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet as pq
import pytest
import zstandard

from drafter_service.ingest import containers, token_files
from drafter_service.ingest.containers import (
    BINARY,
    EMPTY,
    NO_RECORDS,
    NOT_TEXT,
    NOTEBOOK,
    SQLITE,
    VLLM_LOG,
    YAML,
    kind_of,
)
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.files import CUT, NOT_SEEKABLE, Opened, list_files
from drafter_service.ingest.json_text import NOT_UTF8
from drafter_service.ingest.readers import NO_RESPONSE
from drafter_service.ingest.reading import PREFIX_TOKENS, Reading
from drafter_service.ingest.tables import BAD_ROW, LOST_LINE, NO_HEADER
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import SEPARATOR
from tests.drafter_service.ingest.loads import (
    LEARNED,
    RECORDS,
    REFUSED,
    counts_of,
    documents_in,
    faults_of,
    names_in,
    outputs_in,
    small,
    tokenized,
    write_jsonl,
)


@pytest.mark.parametrize(
    ("name", "content", "outputs", "faults"),
    [
        ("a.csv", "prompt,completion\nq,one\nr,two\n", ["one", "two"], {}),
        ("a.csv", '\ufeffprompt,completion\r\nq,"one, ""two""\r\n\r\nthree"\r\n\r\n', ['one, "two"\r\n\r\nthree'], {}),
        ("a.csv", ",prompt,completion\n0,q,one\n1,r,two\n", ["one", "two"], {}),
        ("a.csv", "prompt,completion\n", [], {NO_RECORDS: 1}),
        ("a.json", "[]", [], {NO_RECORDS: 1}),
        ("a.jsonl", "# nothing\n\n", [], {NO_RECORDS: 1}),
        ("a.csv", "completion,completion\none,two\n", [], {NO_HEADER: 1}),
        ("a.csv", 'id;completion\n1;"a;b"\n', ["a;b"], {}),
        ("a.tsv", "prompt\tcompletion\nq\tone, two\n", ["one, two"], {}),
        ("a.txt", "prompt\tcompletion\nq\tone\n", ["one"], {}),
        ("a.csv", "completion\n" + "x" * 200_000 + "\n", ["x" * 200_000], {}),
        ("a.csv", 'response\n"{""choices"": [{""text"": ""one""}]}"\n{not json}\n', ["one", "{not json}"], {}),
        (
            "a.csv",
            "messages\n\"[{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'one'}]\"\n",
            ["one"],
            {},
        ),
        ("a.csv", "completion\n\"{'a': code}\"\n\"{'b': 1\"\n", ["{'a': code}", "{'b': 1"], {}),
        ("a.csv", 'prompt,completion\na,"one\nb,two\nc,d', [], {BAD_ROW: 1, LOST_LINE: 2}),
        ("a.csv", 'prompt,completion\nq,"[1, 2]"\nr,"{""answer"": ""a""}"\n', ["[1, 2]", '{"answer": "a"}'], {}),
        (
            "a.csv",
            'chosen\n"[{""role"": ""user"", ""content"": ""q""}, {""role"": ""assistant"", ""content"": ""a""}]"\n',
            ["a"],
            {},
        ),
        ("a.csv", "completion\n\"{'answer': 'a'}\"\n", ["{'answer': 'a'}"], {}),
        ("a.csv", 'id,choices\n1,"[{""text"": ""one""}]"\n', ["one"], {}),
        ("a.csv", "response\n\"{'choices': [{'text': 'one'}]}\"\n", ["one"], {}),
        ("a.csv", 'prompt,completion\na,"o"ne\nb,two\nc,d,e\nf\n', ["two"], {BAD_ROW: 2, REFUSED: 1}),
        ("a.csv", "prompt,completion\na,\udcff\nb,two\n", ["two"], {NOT_UTF8: 1}),
        ("a.csv", "What is it?,1\nNo,2\n", [], {NO_HEADER: 1}),
        ("a.csv", 'prompt,"comp"letion\na,b\n', [], {NO_HEADER: 1}),
        ("a.csv", "essay,grade\nlong,2\n", [], {REFUSED: 1}),
        ("a.csv", "model,generation\nm,1\nm,\nm,2.5\nm,3\n", [], {REFUSED: 4}),
        ("a.csv", "prompt,completion\n6+1,7\nq,one\n6,6\n", ["one"], {REFUSED: 2}),
    ],
)
def test_csv(tmp_path, name, content, outputs, faults):
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    assert outputs_in(tmp_path / name) == (outputs, faults)


def test_numbers_in_a_column_that_the_user_names_are_read(tmp_path):
    (tmp_path / "a.csv").write_text("question,answer\n6+1,7\n6+2,8\n6+3,9\n")
    assert outputs_in(tmp_path / "a.csv", fields=("question", "answer")) == (["7", "8", "9"], {})


@pytest.mark.parametrize("write", [lambda table, path: pa.csv.write_csv(table, path), pq.write_table])
def test_json_in_a_column_that_the_user_names_is_what_the_model_wrote(tmp_path, vocabulary, write):
    """And messages in the columns of the prompt are messages."""
    chat = orjson.dumps([{"role": "user", "content": "import"}]).decode()
    write(pa.table({"asked": [chat, "[1, 2]"], "said": ['{"text": "a"}', '["b"]']}), tmp_path / "a.csv")
    reading = Reading(vocabulary, ("asked", "said"))
    (batch,) = containers.read_batches(list_files([str(tmp_path / "a.csv")]), reading)
    assert [item.output for item in batch.items] == ['{"text": "a"}', '["b"]']
    assert [item.prompt for item in batch.items] == ["<|user|>import<|end|><|assistant|>", "[1, 2]"]


@pytest.mark.parametrize("kind", ["parquet", "groups", "file", "stream", "cut"])
def test_tables_with_columns_of_token_ids(tmp_path, kind):
    table, path = pa.Table.from_pylist([{**record, "unused": {"x": 1}} for record in RECORDS]), tmp_path / "table"
    if kind in ("parquet", "groups"):
        pq.write_table(table, path, row_group_size=7 if kind == "groups" else 1000)
    else:
        with (pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file)(path, table.schema) as writer:
            writer.write_table(table, max_chunksize=7)
    if kind == "cut":
        path.write_bytes(path.read_bytes()[:8000])
    documents, reading = documents_in(path, reading=small())
    assert list(documents) == [f"{path}:{row}" for row in range(1, len(documents) + 1)]
    assert list(documents.values()) == LEARNED[: len(documents)]
    assert (len(documents) < 50, reading.faults.count) == ((True, 1) if kind == "cut" else (False, 0))


@pytest.mark.parametrize(
    "compress",
    [
        gzip.compress,
        lambda data: bz2.compress(data, 1),
        lambda data: lzma.compress(data, preset=0),
        zstandard.compress,
    ],
)
def test_compressed_files_are_recognized_by_their_content_and_read_up_to_where_they_are_cut_off(tmp_path, compress):
    random = np.random.default_rng(0)
    records = [{"tokens": random.integers(0, 1 << 30, 1000).tolist()} for _ in range(60)]
    data = compress(write_jsonl(tmp_path / "lines", records).read_bytes())
    for name, size in (("whole.jsonl", len(data)), ("cut.jsonl.gz", len(data) * 7 // 8)):
        (tmp_path / name).write_bytes(data[:size])
        documents, reading = documents_in(tmp_path / name)
        assert list(documents.values()) == [record["tokens"] for record in records[: len(documents)]]
        is_cut = size < len(data)
        assert 20 < len(documents) < 60 if is_cut else len(documents) == 60
        assert (reading.faults.count > 0) == is_cut
        # The package of Zstandard does not tell.
        assert (CUT in reading.faults.by_reason) == (is_cut and compress is not zstandard.compress)


def documents_in_pipe(path, content):
    """Return what `documents_in` returns for a pipe with this content."""
    writer = threading.Thread(target=path.write_bytes, args=[content])
    writer.start()
    found = documents_in(path, reading=Reading(block_bytes=1 << 14))
    writer.join()
    return found


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
def test_pipes(tmp_path, compress):
    os.mkfifo(tmp_path / "pipe")
    lines = write_jsonl(tmp_path / "lines", [{"tokens": [1, index]} for index in range(4000)]).read_bytes()
    documents, reading = documents_in_pipe(tmp_path / "pipe", compress(lines))
    assert list(documents.values()) == [[1, index] for index in range(4000)]
    assert reading.faults.count == 0
    documents, reading = documents_in_pipe(tmp_path / "pipe", compress(b"PAR1" + bytes(100)))
    assert (documents, counts_of(reading.faults)) == ({}, {NOT_SEEKABLE: 1})


def said(output, name=None, prompt="q"):
    """Return a record with a request and a response, which may have an id."""
    request = {"messages": [{"role": "user", "content": prompt}]}
    return {"request": request, "response": {"id": name, "choices": [{"message": {"content": output}}]}}


@pytest.mark.parametrize(
    ("first", "second", "known"),
    [
        ([said("a"), said("a")], [said("a")] * 3, 2),
        ([said("a"), said("b")], [said("b"), said("c")], 1),
        ([said("a")], [said("a", prompt="another")], 0),
        ([said("a", "request-1")], [said("a", "request-1")], 1),
        ([said("a", "request-1")], [said("a", "request-2")], 0),
        ([said(text, "request-1") for text in "abc"], [said(text, "request-1") for text in "abcd"], 3),
        ([said("a", "chatcmpl-912")], [said("b", "chatcmpl-912")], 0),
        ([said("a", "chatcmpl-A1"), said("b", "chatcmpl-A1")], [said("b", "chatcmpl-A1"), said("c", "chatcmpl-A1")], 1),
        ([said("a", "0")], [said("b", "0")], 0),
        ([{"text": "a"}], [{"text": "b"}], 0),
        ([{"token_ids": [1]}], [{"token_ids": [1]}, {"token_ids": [2]}], 1),
    ],
)
def test_a_load_recognizes_documents_by_unique_ids_or_by_content(tmp_path, first, second, known):
    """Whatever the file is called, and also if it has grown; another text is never taken for a known one."""
    before = names_in(write_jsonl(tmp_path / "a.jsonl", first))
    after = names_in(write_jsonl(tmp_path / "b.jsonl", second))
    assert (len({*before}), len({*after})) == (len(first), len(second))
    assert len({*before} & {*after}) == known


def test_documents_that_are_no_records_are_recognized_by_content(tmp_path):
    (tmp_path / "a.py").write_text("import os\n")
    np.save(tmp_path / "a.npy", np.arange(6).reshape(2, 3))
    before = names_in(tmp_path / "a.py", tmp_path / "a.npy")
    (tmp_path / "a.py").write_text("import re\n")
    (tmp_path / "a.npy").rename(tmp_path / "b.npy")
    after = names_in(tmp_path / "a.py", tmp_path / "b.npy")
    assert before[1:] == after[1:]
    assert before[0] != after[0]


@pytest.mark.parametrize(("name", "columns"), [("messages", ["id", "messages"]), ("other", ["id", "large", "other"])])
def test_columns_that_no_format_names_are_read_if_they_are_needed(tmp_path, monkeypatch, name, columns):
    read, iter_batches = [], pq.ParquetFile.iter_batches

    def recorded(self, *args, columns=None, **kwargs):
        read.append(columns)
        return iter_batches(self, *args, columns=columns, **kwargs)

    monkeypatch.setattr(pq.ParquetFile, "iter_batches", recorded)
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    pq.write_table(pa.Table.from_pylist([{"id": 1, "large": "c", name: chat}] * 3), tmp_path / "a.parquet")
    assert outputs_in(tmp_path / "a.parquet") == (["b"] * 3, {})
    assert read[-1] == columns


def test_requests_of_batches_are_joined_with_their_responses(tmp_path, vocabulary):
    user, answer = {"role": "user", "content": "import os"}, {"role": "assistant", "content": "def f"}
    write_jsonl(tmp_path / "1.jsonl", [{"custom_id": name, "body": {"messages": [user]}} for name in ("a", "b")])
    response = {"body": {"choices": [{"message": answer}]}}
    write_jsonl(tmp_path / "2.jsonl", [{"custom_id": "a", "response": response, "error": None}])
    documents, reading = documents_in(tmp_path, reading=Reading(vocabulary, for_replay=True))
    expected = [tokenized("<|user|>import os<|end|><|assistant|>") + tokenized("def f")]
    assert list(documents.values()) == expected
    assert counts_of(reading.faults) == {NO_RESPONSE: 1}
    assert reading.faults.by_reason[NO_RESPONSE].places == [f"{tmp_path}/1.jsonl:2"]
    write_jsonl(tmp_path / "1.jsonl", [{"custom_id": "a", "params": {"messages": [user]}}])
    documents, _ = documents_in(tmp_path, reading=Reading(vocabulary, for_replay=True))
    assert list(documents.values()) == expected
    (tmp_path / "11.jsonl").write_bytes((tmp_path / "1.jsonl").read_bytes())
    documents, _ = documents_in(tmp_path, reading=Reading(vocabulary))
    assert list(documents.values()) == [tokenized("def f")], "it is not known which request it answers"


def test_samples_are_taken_of_each_format(tmp_path, vocabulary):
    write_jsonl(tmp_path / "a.jsonl", [{"completion": f"{index} " + "x" * 1000} for index in range(5)])
    (tmp_path / "b.py").write_text("import os\n")
    np.save(tmp_path / "c.npy", np.arange(6).reshape(2, 3))
    _, reading = documents_in(tmp_path, reading=Reading(vocabulary))
    samples = list(reading.samples.values())
    assert [(sample.documents, len(sample.outputs)) for sample in samples] == [(5, 2), (1, 1), (2, 2)]
    assert samples[0].outputs[1] == "1 " + "x" * 198
    assert samples[2].outputs[1].tolist() == [3, 4, 5]


def test_text_records_have_the_end_of_their_prompt_as_prefix(tmp_path, vocabulary):
    prompt = "import os\n" * 2000 + "def f():\n    return os.path.join(a, b)\n"
    path = write_jsonl(tmp_path / "a.jsonl", [{"prompt": prompt, "completion": "print(f())\n"}])
    (document,) = documents_in(path, reading=Reading(vocabulary))[0].values()
    assert document == tokenized(prompt)[-PREFIX_TOKENS:] + tokenized("print(f())\n")
    (document,) = documents_in(path, reading=Reading(vocabulary, for_replay=True))[0].values()
    assert document == tokenized(prompt) + tokenized("print(f())\n")


def test_parquet_with_gaps_and_without_known_columns(tmp_path):
    path = tmp_path / "a.parquet"
    ids = pa.array([[1, 2], None, [], [3], [4, None], [-1]], pa.list_(pa.int64()))
    pq.write_table(pa.table({"token_ids": ids, "text": ["a", "b", None, None, None, None]}), path)
    documents, reading = documents_in(path)
    assert documents == {f"{path}:1": [1, 2], f"{path}:4": [3]}
    assert reading.faults.count == 4
    pq.write_table(pa.table({"essay": ["a"], "ids": [[5, 6]]}), path)
    documents, reading = documents_in(path)
    assert (documents, reading.faults.count) == ({}, 1)
    documents, reading = documents_in(path, reading=Reading(fields=("ids",)))
    assert list(documents.values()) == [[5, 6]]


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_json_in_columns_is_decoded(tmp_path, kind):
    """In those of unknown names, and in known ones where a response may be JSON."""
    chat = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    response = orjson.dumps({"choices": [{"message": {"content": "d"}}]}).decode()
    columns = {
        "log": [orjson.dumps(chat).decode(), "[not JSON", None],
        "completion": [None, '{"c": 1}', None],
        "response": [None, None, response],
    }
    table = pa.table(columns)
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a.parquet")
    else:
        with pa.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
            writer.write_table(table)
    assert outputs_in(tmp_path / f"a.{kind}") == (["b", '{"c": 1}', "d"], {})


def test_fields_that_only_other_objects_of_a_column_have_are_left_out(tmp_path):
    calls = [{"function": {"name": "f", "arguments": arguments}} for arguments in ({"a": 1}, {"b": "x"})]
    table = pa.Table.from_pylist([{"messages": [{"role": "assistant", "tool_calls": calls}]}])
    pq.write_table(table, tmp_path / "a.parquet")
    expected = '{"name": "f", "arguments": {"a": 1}}\n\n{"name": "f", "arguments": {"b": "x"}}'
    assert outputs_in(tmp_path / "a.parquet") == ([expected], {})


@pytest.mark.parametrize("dtype", [np.uint16, np.int64, ">u4"])
def test_rows_of_an_array_are_documents_and_others_are_split(tmp_path, monkeypatch, dtype):
    monkeypatch.setattr(token_files, "PIECE_TOKENS", 400)
    rows = np.arange(3000).astype(dtype).reshape(30, 100)
    np.save(tmp_path / "a.npy", rows)
    assert list(documents_in(tmp_path / "a.npy", reading=small())[0].values()) == rows.tolist()
    np.save(tmp_path / "a.npy", rows.ravel()[:1000])
    pieces = [range(400), range(400, 800), range(800, 1000)]
    assert list(documents_in(tmp_path / "a.npy", reading=small())[0].values()) == [list(piece) for piece in pieces]


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_contain_lengths_of_documents(tmp_path, save):
    save(tmp_path / "a.npz", tokens=np.arange(10), offsets=[0, 3, 3, 10])
    documents, _ = documents_in(tmp_path / "a.npz")
    assert {name.rpartition(":")[2]: tokens for name, tokens in documents.items()} == {
        "1": [0, 1, 2],
        "3": [*range(3, 10)],
    }
    save(
        tmp_path / "a.npz",
        tokens=np.arange(2000),
        prompt_len=[900, 40, 10],
        output_len=[100, 0, 950],
        session=[0, 1, 2],
    )
    documents, _ = documents_in(tmp_path / "a.npz")
    assert list(documents.values()) == [list(range(900 - PREFIX_TOKENS, 1000)), list(range(1040, 2000))]


@pytest.mark.parametrize(
    "arrays",
    [
        {"other": [1]},
        {"tokens": [1.5]},
        {"tokens": [1, 2], "offsets": [0, 3]},
        {"tokens": [1, 2], "offsets": [1, 3]},
        {"tokens": [1, 2], "offsets": [0, 3, 2]},
        {"tokens": [1, 2], "prompt_len": [1], "output_len": [1, 0]},
    ],
)
def test_inconsistent_archives_are_skipped(tmp_path, arrays):
    np.savez(tmp_path / "a.npz", **{name: np.array(values) for name, values in arrays.items()})
    documents, reading = documents_in(tmp_path / "a.npz")
    assert (documents, reading.faults.count) == ({}, 1)


def test_invalid_ids_in_arrays_are_skipped(tmp_path):
    np.save(tmp_path / "a.npy", np.array([[1, 2], [-1, 2], [1 << 32, 0], [int(SEPARATOR), 1], [3, 4]]))
    documents, reading = documents_in(tmp_path / "a.npy")
    assert list(documents.values()) == [[1, 2], [3, 4]]
    assert reading.faults.count == 3


def test_plain_text_and_source_trees(tmp_path, vocabulary):
    files = {
        "b.py": b"import os\n",
        "a.py": b"import sys\n",
        "data.json": b'{\n "a": 1}\n',
        "image": b"\x89PNG\0\0\0",
        "notes": b"a: 1",
        "latin.c": "é".encode("latin-1"),
        "empty": b"\n",
    }
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    documents, reading = documents_in(tmp_path, reading=Reading(vocabulary))
    expected = {name: tokenized(files[name].decode()) for name in ("a.py", "b.py")}
    assert documents == {f"{tmp_path}/{name}:1": tokens for name, tokens in expected.items()}
    assert faults_of(reading) == {EMPTY: 1, BINARY: 1, NOT_UTF8: 1, REFUSED: 1, NOT_TEXT: 1}
    documents, reading = documents_in(tmp_path, reading=Reading(vocabulary, as_text=True))
    assert [name.rpartition("/")[2] for name in documents] == ["a.py:1", "b.py:1", "data.json:1", "notes:1"]


def test_long_text_is_split_at_the_end_of_a_line(tmp_path, vocabulary, monkeypatch):
    monkeypatch.setattr(containers, "PIECE_BYTES", 100)
    lines = [f"value_{index} = {index}\n" for index in range(50)]
    (tmp_path / "a.py").write_text("".join(lines))
    documents, _ = documents_in(tmp_path / "a.py", reading=Reading(vocabulary))
    firsts = [int(name.rpartition(":")[2]) for name in documents]
    assert len(firsts) > 5
    for first, end, document in zip(firsts, [*firsts[1:], 51], documents.values(), strict=True):
        assert document == tokenized("".join(lines[first - 1 : end - 1]))


def test_containers_are_detected_by_the_first_bytes(tmp_path):
    record = orjson.dumps(RECORDS[0])
    contents = {
        "server.log": (record + b"\n" + record, "JSON lines"),
        "prefixed.txt": (b"started\nINFO " + record + b"\nINFO [x.py] " + record, "JSON lines"),
        "long.json": (b'{"tokens": [' + b"1, " * 50_000 + b"1]}", "JSON"),
        "long.jsonl": (b'{"tokens": [' + b"1, " * 50_000 + b"1]}", "JSON lines"),
        "header.txt": (b"log of a service\n" + record, "JSON lines"),
        "banner.log": (b"starting\n" * 8 + b"INFO " + record, "JSON lines"),
        "pretty.txt": (b'{\n  "a": 1\n}', "JSON"),
        "array.log": (b'[\n{"a": 1},\n', "JSON"),
        "broken.jsonl": (b'{"a": 1', "JSON lines"),
        "broken.json": (b"nothing", "JSON"),
        "comments.jsonl": (b"# log\n\n// of it\n" + record + b"\n" + record, "JSON lines"),
        "events.txt": (b"event: a\ndata: " + record + b"\n\n: ping\n\ndata: [DONE]\n", "JSON lines"),
        "table.txt": (b"prompt\tcompletion\na\tb\n", "CSV"),
        "nothing.txt": (b'prompt,"a\rb\n\rc', NOT_TEXT),
        "any.csv": (b"essay\nb\n", "CSV"),
        "json.csv": (record + b"\n" + record, "JSON lines"),
        "notes.txt": (b"[1] A. Author: a title\n[2] Another\n" + record, NOT_TEXT),
        "code.py": (record, "text"),
        "Makefile": (b"all:\n", "text"),
        "README.md": (b"text", NOT_TEXT),
        "table": (b"PAR1....", "Parquet"),
        "rows": (b"\x93NUMPY....", "npy"),
        "corpus": (b"SSDSNAP\n....", "snapshot"),
        "arrow": (b"ARROW1\0\0", "Arrow"),
        "stream.json": (b"\xff\xff\xff\xff\x10\0\0\0", "Arrow"),
        "program": (b"\x7fELF\0", BINARY),
        "chats.db": (b"SQLite format 3\0\x10\0", SQLITE),
        ".aider.llm.history": (b"TO LLM 2026-01-01T10:00:00\n-------\nUSER Why?\n" + record, NOT_TEXT),
        "config.yaml": (b"a: 1\n", YAML),
        "calls.yaml": (b"- request:\n    body: '" + record + b"'\n" + record, YAML),
        "calls.log": (b"---\nhttp_interactions:\n- request: " + record, YAML),
        "calls.txt": (b"interactions:\n- response: 'data: " + record + b"'\n" + record + b"\n" + record, YAML),
        "json.yaml": (record + b"\n" + record, "JSON lines"),
        "front.md": (b"---\ntitle: a\n---\nText\n", NOT_TEXT),
        "a.ipynb": (b'{"nbformat": 4, "cells": []}', NOTEBOOK),
        "notebook.json": (b'{\n "cells": [{"cell_type": "code", "outputs": [{"text": ["no\\n"]}]}]}', NOTEBOOK),
        "vllm.log": (b"INFO 11-22 10:00:00 [logger.py:42] Received request cmpl-1-0: prompt: 'a'\n" * 3, VLLM_LOG),
        "server2.log": (b"INFO started\nINFO stopped\n", NOT_TEXT),
        "notes": (b"text", NOT_TEXT),
        "empty.json": (b" \n", EMPTY),
        "chat.txt": (b"User: Why?\nAssistant: So.\n", NOT_TEXT),
    }
    for name, (content, expected) in contents.items():
        (tmp_path / name).write_bytes(content)
        assert kind_in(tmp_path / name) == expected, name


def kind_in(path):
    """Return the container of a file, or the reason for which it is refused."""
    (file,) = list_files([str(path)])
    with Opened(file) as opened:
        try:
            return kind_of(opened)
        except RecordError as problem:
            return str(problem)


def corpus_file(path, tokens):
    """Save a corpus with one request of the tokens 0, 1, ...; return the bytes of the file."""
    corpus = Corpus(10_000, 32)
    corpus.append(np.arange(tokens, dtype=np.uint32))
    snapshot.save(corpus, path)
    return path.read_bytes()


def test_damaged_files_are_counted_and_loading_continues(tmp_path):
    corpus_file(tmp_path / "corpus", 1000)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, RECORDS))))
    pq.write_table(pa.Table.from_pylist(RECORDS), tmp_path / "a.parquet")
    np.save(tmp_path / "a.npy", np.arange(1000).reshape(10, 100))
    np.savez(tmp_path / "a.npz", tokens=np.arange(1000).reshape(10, 100))
    damaged = sorted(tmp_path.iterdir())
    good = write_jsonl(tmp_path / "good.jsonl", [{"tokens": [1]}])
    for path in damaged:
        data = path.read_bytes()
        path.write_bytes(data[: len(data) // 2])
        documents, reading = documents_in(path, good)
        assert documents[f"{good}:1"] == [1]
        assert path.name in reading.faults.summary


def test_other_file_systems(tmp_path):
    memory = fsspec.filesystem("memory")
    lines = write_jsonl(tmp_path / "a.jsonl", RECORDS).read_bytes()
    memory.pipe({"/logs/a.jsonl": lines, "/logs/deep/b.jsonl.gz": gzip.compress(lines)})
    documents, reading = documents_in("memory://logs", reading=small())
    assert list(documents.values()) == LEARNED * 2
    assert next(iter(documents)) == "memory:///logs/a.jsonl:1"
    assert reading.faults.count == 0


def zipped(path, members):
    """Write an archive of members by name; return its path."""
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path


def test_archives_are_read_member_by_member(tmp_path):
    lines = write_jsonl(tmp_path / "a.jsonl", RECORDS).read_bytes()
    rows = io.BytesIO()
    pq.write_table(pa.Table.from_pylist(RECORDS), rows)
    members = {"x/a.jsonl": lines, "b.gz": gzip.compress(lines), "c": rows.getvalue()}
    path = zipped(tmp_path / "b.log", members | {"broken.zip": b"PK\x03\x04", "picture.png": b"\x89PNG\0"})
    documents, reading = documents_in(path, reading=small())
    assert list(documents.values()) == LEARNED * 3
    assert list(documents)[::50] == [f"{path}/{name}:1" for name in members]
    places = {fault.places[0].rpartition("/")[2] for fault in reading.faults.by_reason.values()}
    assert places == {"broken.zip", "picture.png"}
    outer = {"corpus.ssd": corpus_file(tmp_path / "corpus.ssd", 10), "b.zip": path.read_bytes()}
    path = zipped(tmp_path / "c.zip", outer)
    documents, _ = documents_in(path, reading=small())
    assert list(documents.values()) == [list(range(10)), *LEARNED * 3]
    assert list(documents)[::50] == [f"{path}/corpus.ssd:1", *(f"{path}/b.zip/{name}:50" for name in members)]


def test_archives_of_other_kinds(tmp_path):
    assert kind_in(zipped(tmp_path / "b.docx", {"[Content_Types].xml": "<x/>"})) == BINARY
    np.savez(tmp_path / "a.npz", tokens=np.arange(10))
    (tmp_path / "a.npz").rename(tmp_path / "a.jsonl")
    assert list(documents_in(tmp_path / "a.jsonl")[0].values()) == [list(range(10))]
    # Parts of Inspect's logs beside the samples are not counted.
    names = ("_journal/start.json", "_journal/summaries/1.json", "header.json", "summaries.json")
    fact, sample = (json.dumps(each) for each in ({"eval": {"task": "t"}, "input": "Why?"}, RECORDS[0]))
    parts = dict.fromkeys(names, fact) | {"samples/1_epoch_1.json": sample}
    documents, reading = documents_in(zipped(tmp_path / "a.eval", parts), reading=small())
    assert list(documents.values()) == LEARNED[:1]
    assert reading.faults.count == 0
    documents, _ = documents_in(zipped(tmp_path / "a.zip", {"summaries.json": sample}))
    assert list(documents.values()) == LEARNED[:1]
