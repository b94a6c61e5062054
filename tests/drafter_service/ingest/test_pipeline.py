"""Loads: order, bounds on work in flight, errors, text without a tokenizer."""

import threading
from contextlib import closing
from itertools import pairwise, repeat

import numpy as np
import pytest

from drafter_service.ingest import pipeline
from drafter_service.ingest.containers import Batch
from drafter_service.ingest.documents import NO_TOKENIZER, Item
from drafter_service.ingest.files import list_files
from drafter_service.ingest.pipeline import BATCHES_AHEAD
from drafter_service.ingest.reading import Reading
from ssd.errors import UserError
from tests.drafter_service.ingest.loads import Collected, counts_of, model_folder, tokenized, write_jsonl

TIMEOUT_S = 30
MAX_IN_FLIGHT = BATCHES_AHEAD + 1
"""Maximum number of batches in flight, with the one at the sink."""


def load(sources, sink, reading=None, watch=lambda *_: None):
    return pipeline.load(list_files(map(str, sources)), reading or Reading(), sink, watch)


def threads_of_loads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("warm-")]


def test_documents_keep_the_order_of_their_files(tmp_path, vocabulary):
    records = [{"text": f"value_{index} = {index}\n"} if index % 3 else {"tokens": [index]} for index in range(500)]
    write_jsonl(tmp_path / "a.jsonl", records)
    write_jsonl(tmp_path / "b.jsonl", records)
    sink, seen = Collected(), []
    reading = Reading(vocabulary, block_bytes=500)
    learned = load([tmp_path], sink, reading, lambda *progress: seen.append(progress))
    expected = [tokenized(record["text"]) if "text" in record else record["tokens"] for record in records]
    assert [tokens for _, tokens in sink.pairs] == expected * 2
    assert len({name for name, _ in sink.pairs}) == 1000
    assert len(seen) > 10
    assert all(earlier <= later for earlier, later in pairwise(seen))
    assert seen[-1] == (sum(file.size for file in list_files([str(tmp_path)])), sum(map(len, expected * 2)))
    assert learned.documents == 1000
    assert reading.kinds == {"JSON lines": 2}


def test_work_in_flight_is_bounded(tmp_path, monkeypatch):
    """The reader waits for the sink, so memory does not grow with the size of a load."""
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": list(range(100))} for _ in range(5000)])
    changed = threading.Condition()
    produced, weights = [0], []
    read_batches = pipeline.read_batches

    def counted(*arguments):
        for batch in read_batches(*arguments):
            with changed:
                produced[0] += 1
                changed.notify_all()
            weights.append(sum(item.nbytes for item in batch.items))
            yield batch

    class Slow(Collected):
        accepted, most = 0, 0

        def accept(self, documents):
            super().accept(documents)
            with changed:
                if self.accepted == 0:
                    assert changed.wait_for(lambda: produced[0] >= MAX_IN_FLIGHT, TIMEOUT_S)
                    assert not changed.wait_for(lambda: produced[0] > MAX_IN_FLIGHT, 0.3)
                self.most = max(self.most, produced[0] - self.accepted)
                self.accepted += 1

    monkeypatch.setattr(pipeline, "read_batches", counted)
    sink = Slow()
    load([tmp_path], sink, Reading(block_bytes=4000))
    assert sink.most == MAX_IN_FLIGHT < sink.accepted
    assert max(weights) < 2 * 4000
    assert len(sink.pairs) == 5000


def test_whole_prompts_are_not_kept_in_memory(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"prompt_token_ids": list(range(10_000)), "token_ids": [1]}])
    ((item,), *_) = next(iter(pipeline.read_batches(list_files([str(tmp_path)]), Reading())))
    assert item.prompt.base is None


@pytest.mark.parametrize("where", ["accept", "finish", "encode", "read_batches"])
def test_errors_of_the_sink_the_tokenizer_and_the_source_end_the_load(tmp_path, vocabulary, monkeypatch, where):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "import"}] * 1000)

    def fail(*_):
        raise MemoryError("full")

    def broken(*_):
        yield Batch([Item("a:1", None, np.array([1], np.uint32), name="a")], 1)
        fail()

    owner = {"encode": vocabulary, "read_batches": pipeline}.get(where, sink := Collected())
    monkeypatch.setattr(owner, where, broken if where == "read_batches" else fail)
    with pytest.raises(MemoryError, match="full"):
        load([tmp_path], sink, Reading(vocabulary, block_bytes=1000))
    assert threads_of_loads() == []
    assert where != "read_batches" or sink.pairs == [("a", [1])]


def test_long_logs_of_text_without_a_tokenizer_fail_early(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a" * 100}] * 20_000)
    seen = []
    with pytest.raises(UserError, match="--tokenizer FOLDER"):
        load([tmp_path], Collected(), Reading(block_bytes=2000), lambda *progress: seen.append(progress))
    assert len(seen) < 200


def test_some_text_among_token_ids_is_only_counted(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"text": "a"}] * 10 + [{"tokens": [1]}])
    reading = Reading()
    assert load([tmp_path], Collected(), reading).documents == 1
    assert counts_of(reading.faults) == {NO_TOKENIZER: 10}


def test_messages_refused_by_the_chat_template_are_counted(tmp_path):
    from drafter_service.ingest.reading import Vocabulary

    vocabulary = Vocabulary(model_folder(tmp_path / "m", "{{ raise_exception('secret ' + messages[0].content) }}"))
    messages = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "def f"}]
    write_jsonl(tmp_path / "a.jsonl", [{"messages": messages}, {"text": "import os"}])
    reading = Reading(vocabulary)
    load([tmp_path / "a.jsonl"], Collected(), reading)
    assert [fault.places for fault in reading.faults.by_reason.values()] == [[f"{tmp_path}/a.jsonl:1"]]
    assert "secret" not in str(reading.faults.by_reason)


def test_threads_end_when_the_iterator_is_closed(monkeypatch):
    monkeypatch.setattr(pipeline, "read_batches", lambda *_: repeat(Batch([], 0)))
    with closing(pipeline.read_all([], Reading(), lambda items, _: items)) as batches:
        assert next(batches) == (0, [])
    assert threads_of_loads() == []
