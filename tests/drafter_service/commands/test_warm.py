"""`ssd-drafter warm`, from the command line to the snapshot."""

import hashlib
import json
import os
import re
import sys
from contextlib import contextmanager

import numpy as np
import pytest
from click.testing import CliRunner

from drafter_service.client.identity import model_identity
from drafter_service.commands.warm import warm
from drafter_service.ingest import pipeline, sinks
from drafter_service.ingest.files import list_files
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sinks import OfflineSink
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.errors import UserError
from ssd.stats import Stats
from tests.drafter_service.ingest.loads import MODEL, Collected, tokenized, write_jsonl
from tests.drafter_service.raw import connected
from tests.servers import served, serving


def result_of(*arguments):
    """Run the command; return what it prints, in lines of up to 300 characters. Raises its errors."""
    # With FORCE_COLOR, lines would have 80 characters where TERM is "dumb".
    return CliRunner(env={"COLUMNS": "300", "FORCE_COLOR": None}).invoke(
        warm, list(map(str, arguments)), catch_exceptions=False, standalone_mode=False
    )


def invoke(*arguments):
    return result_of(*arguments).stdout


def text_of(path):
    """Return the tokens of each request in a snapshot."""
    corpus = snapshot.load(path, 1 << 20, DrafterConfig.match_depth).corpus
    state = corpus.state()
    text = state.ring.read(state.oldest, state.head)
    return [part[:-1].tolist() for part in np.split(text, np.flatnonzero(text == 0xFFFF_FFFF) + 1)[:-1]]


def test_snapshot_is_created_and_extended(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [1, 2]}, {"no": 1}])
    write_jsonl(tmp_path / "b.jsonl", [{"text": "import os\n"}])
    target = tmp_path / "c.ssd"
    printed = invoke("--from", tmp_path / "a.jsonl", "--snapshot", target, "--capacity", "1M")
    assert text_of(target) == [[1, 2]]
    assert f"{tmp_path}/a.jsonl:2" in printed
    both = tmp_path / "a.jsonl", tmp_path / "b.jsonl"
    printed = invoke("--from", *both, "--snapshot", target, "--tokenizer", MODEL, "--capacity", "1M")
    assert text_of(target) == [[1, 2], tokenized("import os\n")]
    assert re.search("documents +│ 1 ", printed)


def test_snapshot_keeps_its_other_contents(tmp_path):
    corpus, stats = Corpus(1 << 20, 16), Stats()
    corpus.append(np.array([5, 6, 7], np.uint32), "old")
    corpus.learned.cells[0] = 0.25
    stats.counters.steps[:] = 11
    snapshot.save(corpus, tmp_path / "c.ssd", stats)
    write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [1]}])
    invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c.ssd", "--capacity", "1M")
    loaded = snapshot.load(tmp_path / "c.ssd", 1 << 20, 16)
    assert loaded.corpus.tokens == 6
    assert (loaded.corpus.learned.cells[0] == 0.25).all()
    assert (loaded.stats.counters.steps == 11).all()


def test_larger_snapshot_keeps_its_size_by_default(tmp_path, monkeypatch):
    corpus = Corpus(1 << 20, 32)
    for index in range(200):
        corpus.append(np.full(999, index, np.uint32))
    snapshot.save(corpus, tmp_path / "c.ssd")
    write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [1]}])
    monkeypatch.setattr(DrafterConfig, "capacity", 5000)
    invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c.ssd")
    assert len(text_of(tmp_path / "c.ssd")) == 201
    invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c.ssd", "--capacity", "50k")
    assert len(text_of(tmp_path / "c.ssd")) < 60


def test_only_text_within_the_capacity_is_sorted(tmp_path, monkeypatch):
    """Text that newer text overwrites before the corpus is saved is dropped at once."""
    rows = [{"tokens": [index] * 99} for index in range(400)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    appended = []
    monkeypatch.setattr(sinks.Corpus, "append", lambda _, tokens, *_rest, **_options: appended.append(tokens[0]))
    sink, held = OfflineSink(tmp_path / "c.ssd", 5000), []
    accept = sink.accept

    def watched(documents):
        accept(documents)
        held.append(sum(len(tokens) + 1 for tokens, *_ in sink._waiting))

    sink.accept = watched
    files, reading = list_files([str(tmp_path / "a.jsonl")]), Reading(block_bytes=2000)
    pipeline.load(files, reading, sink, lambda *_: None)
    assert 5000 <= max(held) < 5000 + 2 * 2000
    assert appended[-50:] == list(range(350, 400))
    assert len(appended) < 100


def test_learning_into_a_service(tmp_path, monkeypatch):
    """The default namespace is that of engines with the model."""
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}])
    sink, called = Collected(), []
    monkeypatch.setattr("drafter_service.ingest.sinks.RemoteSink", lambda *where, **_: called.append(where) or sink)
    given = "--from", tmp_path / "a.jsonl", "--address", "unix:/x", "--tokenizer", MODEL
    invoke(*given, "--namespace", "n")
    learning, warning = result_of(*given).stderr.splitlines()[:2]
    assert learning == "learning into the namespace n (5 tokens)"
    assert warning.startswith("warning: namespace n is empty, but namespace other holds 7 tokens")
    (_, named, model, _), (_, default, full_model, _) = called
    assert (named, model.tokenizer) == ("n", hashlib.sha256((MODEL / "tokenizer.json").read_bytes()).hexdigest())
    assert (default, full_model) == ("", model_identity(MODEL))
    assert [tokens for _, tokens in sink.pairs] == [[1], [1]]


def test_loads_that_learn_nothing_fail(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"unknown": 1}, {"unknown": 2}])
    with pytest.raises(UserError, match=r"nothing was learned: .*a.jsonl:1\)"):
        invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(UserError, match="nothing was learned: an empty file"):
        invoke("--from", tmp_path / "empty.jsonl", "--snapshot", tmp_path / "c")
    assert not (tmp_path / "c").exists()


def test_a_sample_of_each_format_is_shown(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"completion": "import os\n\x1b[31m[red]"}, {"token_ids": tokenized("def f")}])
    (tmp_path / "b.py").write_text("import re\n")
    arguments = ("--from", tmp_path, "--tokenizer", MODEL)
    result = CliRunner().invoke(warm, [*map(str, arguments), "--snapshot", str(tmp_path / "c.ssd")])
    assert result.exit_code == 0
    assert "1 documents found, with outputs such as\n    import re\n" in result.stderr
    assert "    import os \ufffd[31m[red]\n" in result.stderr
    assert "    def f\n" in result.stderr
    assert "outputs such as" not in result.stdout
    quiet = ["--quiet", "--snapshot", str(tmp_path / "d.ssd")]
    assert "import" not in CliRunner().invoke(warm, [*map(str, arguments), *quiet]).stderr


def test_every_file_and_document_is_accounted_for(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [1]}, {"token_ids": [1]}, {"text": "x"}, {"prompt": "q"}])
    np.savez(tmp_path / "b.npz", tokens=np.arange(3), offsets=[0, 3, 3])
    for name, content in {
        "c.py": "",
        "d.csv": "essay\nx\n",
        "e.yaml": "a: 1",
        "f.txt": "a",
    }.items():
        (tmp_path / name).write_text(content)
    printed = invoke("--from", tmp_path, "--snapshot", tmp_path / "c.ssd")
    assert re.search(r"files +│ 3 skipped, 1 JSON lines, 1 npz, 1 CSV +│", printed)
    assert re.search("documents +│ 3 +│", printed)
    skipped = re.findall(r"^│ (.+?) +│ 1 +│ /", printed, re.MULTILINE)
    for reason in (
        "an empty file",
        "text, but no --tokenizer",
        "an output without tokens",
        "neither JSON nor a table",
        "essay; --field NAME reads one field as the output; the first line of a CSV names its columns",
        "YAML",
    ):
        assert any(reason in each for each in skipped), reason


def test_dry_runs_read_everything_and_learn_nothing(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"completion": "import os"}] * 3 + [{"none": 1}])
    printed = invoke("--from", tmp_path / "a.jsonl", "--dry-run")
    assert "import os\n    import os\n" in printed
    assert "documents: 3 " in printed
    assert "a.jsonl:4" in printed
    name = re.search(r"a.jsonl:1 \(name (\w+)\)", printed)[1]
    invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c.ssd", "--tokenizer", MODEL)
    assert hash_of(name) in snapshot.load(tmp_path / "c.ssd").corpus.request_times(), "it shows how to forget a record"
    assert "import" not in invoke("--from", tmp_path / "a.jsonl", "--dry-run", "--quiet", "--namespace", "n")
    write_jsonl(tmp_path / "a.jsonl", [{"none": 1}])
    with pytest.raises(UserError, match=r"no documents were found: .*a.jsonl:1"):
        invoke("--from", tmp_path / "a.jsonl", "--dry-run")


@contextmanager
def standard_input(log, *, is_pipe):
    """Make a file, or a pipe with its content, the standard input of this process."""
    kept, (source, sink) = os.dup(0), os.pipe()
    with log.open("rb") as file, os.fdopen(source), os.fdopen(sink, "wb") as pipe:
        pipe.write(file.read())
        pipe.close()
        file.seek(0)
        os.dup2(source if is_pipe else file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(kept, 0)
            os.close(kept)


@pytest.mark.parametrize("is_pipe", [True, False])
def test_standard_input_is_read(tmp_path, is_pipe):
    """A second log on standard input is not skipped as the first one."""
    for token, expected in ((1, [[1]]), (2, [[1], [2]]), (1, [[1], [2]])):
        log = write_jsonl(tmp_path / "a.jsonl", [{"token_ids": [token]}])
        with standard_input(log, is_pipe=is_pipe):
            invoke("--from", "-", "--snapshot", tmp_path / "c", "--capacity", "1M")
        assert text_of(tmp_path / "c") == expected


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--from", "{}/a.jsonl"], "give a destination: --snapshot FILE, --namespace NAME, or --tokenizer FOLDER"),
        (["--from", "{}/a.jsonl", "--snapshot", "{}/c", "--namespace", "n"], "not both"),
        (["--from", "{}/missing", "--snapshot", "{}/c"], "no such file"),
        (["--from", "{}/a.jsonl", "--snapshot", "{}/missing/c"], "create it first"),
        (["--from", "{}/a.jsonl", "--snapshot", "{}/c", "--capacity", "5"], "--capacity: a corpus holds"),
        (["--from", "{}/a.jsonl", "--snapshot", "{}/a.jsonl"], "is not a snapshot"),
        (["--from", "{}/a.jsonl", "--snapshot", "{}/c", "--tokenizer", "{}"], "has no tokenizer.json"),
        (["--from", "{}/a.py", "--snapshot", "{}/c"], "--tokenizer FOLDER"),
        (["--from", "{}/a.parquet", "--snapshot", "{}/c"], r"pip install '\.\[parquet\]'"),
    ],
)
def test_user_errors_are_one_line(tmp_path, monkeypatch, arguments, message):
    (tmp_path / "a.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}])
    (tmp_path / "a.py").write_text("text\n")
    with pytest.raises(UserError, match=message) as problem:
        invoke(*(argument.format(tmp_path) for argument in arguments))
    assert "\n" not in str(problem.value)
    assert not (tmp_path / "c").exists()


def test_interruption_says_what_is_kept(tmp_path, monkeypatch):
    write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}])

    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(Collected, "accept", interrupted)
    monkeypatch.setattr(sinks, "OfflineSink", lambda *_: Collected())
    monkeypatch.setattr(sinks, "RemoteSink", lambda *_, **__: Collected())
    with pytest.raises(UserError, match="interrupted; nothing was saved"):
        invoke("--from", tmp_path / "a.jsonl", "--snapshot", tmp_path / "c")
    with pytest.raises(UserError, match="skips what the service has learned"):
        invoke("--from", tmp_path / "a.jsonl", "--namespace", "n")


def test_text_that_is_not_saved_is_reported(tmp_path):
    log = write_jsonl(tmp_path / "a.jsonl", [{"tokens": [1]}])
    with serving(listen=f"unix:{tmp_path}/s", drafting=DrafterConfig(capacity=300_000)) as address:
        printed = invoke("--from", log, "--address", address, "--namespace", "n")
    assert re.search(r"saved +│ no, only in the service's memory \(.*no snapshot folder", printed)


def test_a_service_learns_requests_and_its_end_is_reported(tmp_path, monkeypatch):
    records = [{"prompt_token_ids": list(range(50)), "completion_token_ids": list(range(50, 90))}] * 3
    log = write_jsonl(tmp_path / "a.jsonl", records)
    address = f"unix:{tmp_path}/s"
    observe, sent = sinks.RemoteSink._observe, []
    folder = tmp_path / "snapshots"

    def recorded(sink, texts):
        sent.append([] if texts is None else [*texts.request_ids])
        return observe(sink, texts)

    with served("--listen", address, "--capacity", "300k", "--snapshot-folder", folder) as process:
        with monkeypatch.context() as patch:
            patch.setattr(sinks, "MAX_TEXTS", 2)
            patch.setattr(sinks.RemoteSink, "_observe", recorded)
            printed = invoke("--from", log, "--address", address, "--namespace", "n")
        assert [len(names) for names in sent] == [0, 2, 1]
        assert re.search(r"saved +│ yes, \d+\.\d MB +│", printed)
        assert (folder / "n" / "corpus.ssd").exists()
        with connected(address) as caller:
            (namespace,) = json.loads(caller.call("Report").json)["namespaces"]
        assert namespace["corpus"]["learned_tokens"] == 3 * (32 + 40), "of a prompt, the end is learned"
        accept = sinks.RemoteSink.accept

        def stop_between_two(sink, documents):
            accept(sink, documents)
            sink._wait()
            process.terminate()
            process.wait()
            accept(sink, documents)

        monkeypatch.setattr(sinks.RemoteSink, "accept", stop_between_two)
        write_jsonl(log, [{"tokens": [1]}])
        with pytest.raises(UserError, match=r"no drafter answers .*; the same command skips what it has saved"):
            invoke("--from", log, "--address", address, "--namespace", "other")
