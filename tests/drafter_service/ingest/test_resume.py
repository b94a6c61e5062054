"""An interrupted load that is continued learns the same as an uninterrupted one."""

import gzip

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import settings

from drafter_service.ingest import lines, pipeline, sinks
from drafter_service.ingest.batches import kind_of, read_as
from drafter_service.ingest.documents import Position
from drafter_service.ingest.files import list_files
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.resume import Resume
from drafter_service.ingest.sinks import OfflineSink
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import MIN_CAPACITY
from ssd.corpus.sections import read_sections
from ssd.errors import UserError
from tests.drafter_service.ingest.loads import write_jsonl

BLOCK = 1500
"""Block size in bytes, so small that a load has many blocks."""


class KilledError(Exception):
    """Simulates that the process is killed."""


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a file of each format; together they have several times the capacity of the corpus."""
    folder = tmp_path_factory.mktemp("sources")
    rng = np.random.default_rng(0)

    def texts(count):
        return [rng.integers(0, 300, size).tolist() for size in rng.integers(1, 120, count).tolist()]

    records = [
        {"prompt_token_ids": prompt, "token_ids": output} for prompt, output in zip(texts(60), texts(60), strict=True)
    ]
    path = write_jsonl(folder / "a.jsonl", [*records, {"bad": 1}, {"token_ids": [-1]}])
    (folder / "b.jsonl.gz").write_bytes(gzip.compress(b"\n".join(map(orjson.dumps, records[::-1])), mtime=0))
    pq.write_table(pa.table({"tokens": texts(80)}), folder / "c.parquet", row_group_size=30)
    np.save(folder / "d.npy", rng.integers(0, 300, (40, 50)))
    tokens = texts(40)
    np.savez(folder / "e.npz", tokens=np.concatenate(tokens), offsets=np.cumsum([0, *map(len, tokens)]))
    corpus = Corpus(MIN_CAPACITY, 32)
    for index, text in enumerate(texts(40)):
        corpus.append(np.array(text, np.uint32), f"r{index}" if index % 2 else None)
    snapshot.save(corpus, folder / "f.ssd")
    (folder / "g.py").write_text("".join(f"value_{index} = {index}\n" for index in range(400)))
    assert path.exists()
    return list_files([str(folder)])


def run(files, folder, vocabulary):
    """Load files into a snapshot in `folder`."""
    sink = OfflineSink(folder / "corpus.ssd", MIN_CAPACITY)
    resume = Resume(folder / "resume.json", "destination")
    reading = Reading(vocabulary, block_bytes=BLOCK)
    return pipeline.load(files, reading, sink, resume, lambda _: None)


def learned(folder):
    """Return the texts and names in a snapshot; times differ between loads."""
    sections = read_sections(folder / "corpus.ssd")
    return {name: sections[name].tolist() for name in ("text", "requests.first", "requests.name")}


@pytest.mark.parametrize("index", range(7))
def test_every_format_continues_from_any_position(sources, vocabulary, index, monkeypatch):
    monkeypatch.setattr(lines, "PIECE_BYTES", 500)
    file, reading = sources[index], Reading(vocabulary, block_bytes=BLOCK)

    def chunks_from(position):
        return list(read_as(kind_of(file), file, position, reading))

    def items_of(chunks):
        return [(item.name, list(item.output)) for chunk in chunks for item in chunk.items]

    chunks = chunks_from(Position())
    assert len(chunks) > 3
    for done, chunk in enumerate(chunks, 1):
        assert items_of(chunks_from(chunk.position)) == items_of(chunks[done:])


class Interruption:
    """Interrupts a load at its n-th step: before or after a batch is accepted, a snapshot saved, or progress stored."""

    def __init__(self, monkeypatch, at):
        self.steps, self.at = [], at
        for owner, name in ((OfflineSink, "accept"), (sinks.snapshot, "save"), (Resume, "write")):
            monkeypatch.setattr(owner, name, self.around(getattr(owner, name)))

    def around(self, function):
        def interrupted(*arguments):
            self.step(f"before {function.__name__}")
            result = function(*arguments)
            self.step(f"after {function.__name__}")
            return result

        return interrupted

    def step(self, name):
        if len(self.steps) == self.at:
            raise KilledError
        self.steps.append(name)

    def chosen(self):
        """Return some steps of each kind, at different times of the load; all steps in the profile `fuzz`."""
        steps = range(len(self.steps))
        if settings.get_current_profile_name() == "fuzz":
            return list(steps)
        kinds = sorted(set(self.steps))
        of_kind = [[step for step in steps if self.steps[step] == kind] for kind in kinds]
        return [step for offset, some in enumerate(of_kind) for step in some[offset :: max(1, len(some) // 3)]]


def test_interrupted_loads_continue_to_the_same_corpus(sources, tmp_path, vocabulary, monkeypatch):
    (tmp_path / "whole").mkdir()
    with monkeypatch.context() as patch:
        interruption = Interruption(patch, at=-1)
        summary = run(sources, tmp_path / "whole", vocabulary)
    expected = learned(tmp_path / "whole")
    assert summary.learned.tokens > 4 * MIN_CAPACITY, "the oldest must have been overwritten"
    assert summary.learned.duplicates == 0
    assert summary.faults.count == 2
    for at in interruption.chosen():
        folder = tmp_path / str(at)
        folder.mkdir()
        with monkeypatch.context() as patch:
            Interruption(patch, at)
            with pytest.raises(KilledError):
                run(sources, folder, vocabulary)
        run(sources, folder, vocabulary)
        assert learned(folder) == expected, f"killed at step {at}"


def test_resumed_load_equals_an_uninterrupted_one(sources, tmp_path, vocabulary):
    """Additional commits do not change the newest text."""
    (tmp_path / "whole").mkdir()
    run(sources, tmp_path / "whole", vocabulary)
    sink = OfflineSink(tmp_path / "corpus.ssd", MIN_CAPACITY)
    pipeline.load(sources, Reading(vocabulary, block_bytes=BLOCK), sink, Resume(None, ""), lambda _: None)
    newest = slice(-MIN_CAPACITY, None)
    assert learned(tmp_path)["text"][newest] == learned(tmp_path / "whole")["text"][newest]


def test_finished_files_are_not_read_again(sources, tmp_path, vocabulary):
    run(sources, tmp_path, vocabulary)
    summary = run(sources, tmp_path, vocabulary)
    assert (summary.learned.documents, summary.learned.duplicates, summary.kinds) == (0, 0, {})


def test_changed_files_are_read_again_and_only_new_documents_are_learned(tmp_path):
    path = write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}, {"tokens": [2]}])
    run(list_files([str(path)]), tmp_path, None)
    write_jsonl(path, [{"tokens": [1]}, {"tokens": [2]}, {"tokens": [3]}])
    summary = run(list_files([str(path)]), tmp_path, None)
    assert (summary.learned.documents, summary.learned.duplicates) == (1, 2)
    assert [token for token in learned(tmp_path)["text"] if token < 10] == [1, 2, 3]


@pytest.mark.parametrize("content", [b"", b"{}", b"[1]", b"\xff", b'{"into": 1, "files": {}}'])
def test_other_files_are_refused_as_progress(tmp_path, content):
    (tmp_path / "r").write_bytes(content)
    with pytest.raises(UserError, match="remove it"):
        Resume(tmp_path / "r", "destination")


def test_progress_of_another_load_is_refused(tmp_path):
    Resume(tmp_path / "r", "the first").write()
    Resume(tmp_path / "r", "the first")
    with pytest.raises(UserError, match="a load into the first"):
        Resume(tmp_path / "r", "the second")


def test_unwritable_progress_file_is_an_error(tmp_path):
    resume = Resume(tmp_path / "missing" / "r", "destination")
    with pytest.raises(UserError, match="cannot be written"):
        resume.write()
