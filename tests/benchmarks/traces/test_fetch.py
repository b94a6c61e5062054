"""Traces are downloaded from a mirror in a folder, continued after interruptions, and checked."""

import base64
import hashlib
import json
import shutil
import urllib.request

import pytest

from benchmarks.traces import load_manifest
from benchmarks.traces.__main__ import DownloadError, download, fetch, main
from benchmarks.traces.conversion import VOCABULARIES
from benchmarks.traces.formats import FORMATS
from ssd.replay import Recording
from tests.benchmarks.traces.byte_encoder import ByteEncoder

ANSWERS = b"\n".join(
    json.dumps({"uid": str(number), "messages": [{"content": "q"}, {"content": {"answer": f"a{number}"}}]}).encode()
    for number in range(5)
)
BYTES = b"\n".join(base64.b64encode(bytes([byte])) + f" {byte}".encode() for byte in range(256))
RANKS, NAME = "https://ranks.example/o200k.tiktoken", "data/a+b=1.jsonl"
FILES = {
    "raw.githubusercontent.com/owner/name/c0ffee/LICENSE": b"Do what you like.",
    f"raw.githubusercontent.com/owner/name/c0ffee/{NAME}": ANSWERS,
    "ranks.example/o200k.tiktoken": BYTES,
    "ranks.example/LICENSE": b"MIT",
}


def sha256(content):
    return hashlib.sha256(content).hexdigest()


@pytest.fixture
def mirror(tmp_path):
    """Return the address of a mirror, a folder."""
    for name, content in FILES.items():
        (tmp_path / "mirror" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "mirror" / name).write_bytes(content)
    return (tmp_path / "mirror").as_uri()


@pytest.fixture
def manifest(tmp_path):
    """Return a function that writes a manifest of one trace, with changes, and returns its path."""

    def write(**changes):
        vocabulary = {
            "ranks": {"url": RANKS, "sha256": sha256(BYTES)},
            "notice": {"url": "https://ranks.example/LICENSE", "sha256": sha256(b"MIT")},
        }
        trace = {
            "repository": "owner/name",
            "commit": "c0ffee",
            "licence": "MIT",
            "format": "arena-hard",
            "vocabulary": "o200k",
            "notice": {"LICENSE": sha256(b"Do what you like.")},
            "files": {NAME: sha256(ANSWERS)},
            "requests": 5,
            "prompt_tokens": 5 * 19,
            "output_tokens": 5 * 3,
            "digests": {},
        }
        path = tmp_path / "manifest.json"
        path.write_text(json.dumps({"vocabularies": {"o200k": vocabulary}, "traces": {"chat": trace | changes}}))
        return path

    return write


def fetched(path, folder, mirror):
    """Fetch the trace of a manifest, and return its differences."""
    [(name, source)] = load_manifest(path).items()
    return fetch(name, source, folder, mirror, lambda *_: ByteEncoder())


def test_a_trace_is_made_with_its_licences_and_nothing_is_downloaded_again(manifest, tmp_path, mirror):
    folder = tmp_path / "traces"
    assert fetched(manifest(), folder, mirror) == []
    trace = Recording.load(folder / "chat.npz")
    outputs = sorted(bytes(request.output[:-1].tolist()) for request in trace.requests)
    assert outputs == [b"a%d" % number for number in range(5)]
    licences = {path.name: path.read_text() for path in (folder / "licences").iterdir()}
    assert licences == {"chat.txt": "Do what you like.", "o200k.txt": "MIT"}
    (folder / "chat.npz").unlink()
    shutil.rmtree(tmp_path / "mirror")
    for _ in range(2):
        assert fetched(manifest(), folder, mirror) == []


def test_differences_from_the_manifest_are_named(manifest, tmp_path, mirror):
    path = manifest(requests=6, digests={"tokens": "0" * 64})
    assert fetched(path, tmp_path, mirror) == ["5 requests, not 6", "array tokens"]


def test_files_of_another_format_are_an_error(manifest, tmp_path, mirror):
    with pytest.raises(ValueError, match="chat are not in the format zero-eval"):
        fetched(manifest(format="zero-eval"), tmp_path, mirror)


def test_a_lost_connection_leaves_no_file_and_the_same_download_continues(tmp_path, mirror, monkeypatch):
    def lose(url, timeout):
        raise ConnectionResetError("lost")

    path = tmp_path / "made" / "ranks"
    with monkeypatch.context() as patch:
        patch.setattr(urllib.request, "urlopen", lose)
        with pytest.raises(DownloadError, match="the same command continues"):
            download(RANKS, sha256(BYTES), path, mirror)
    assert not path.parent.exists()
    assert download(RANKS, sha256(BYTES), path, mirror) == path.read_bytes() == BYTES


def test_another_file_than_expected_is_refused_and_not_kept(tmp_path, mirror):
    path = tmp_path / "made" / "ranks"
    with pytest.raises(DownloadError, match="another file than expected"):
        download(RANKS, sha256(b"other"), path, mirror)
    assert not path.parent.exists()


def test_the_command_reports_each_trace(manifest, tmp_path, mirror, capsys):
    pytest.importorskip("tiktoken", reason="tiktoken (extra dev) is not installed")
    folder = tmp_path / "traces"
    arguments = ["fetch", "all", "--folder", str(folder), "--mirror", mirror, "--manifest", str(manifest())]
    assert main(arguments) == 0
    assert "as in the manifest" in capsys.readouterr().out
    (folder / "chat.npz").unlink()
    shutil.rmtree(folder / "sources")
    shutil.rmtree(tmp_path / "mirror")
    assert main(arguments) == 1
    assert "failed: " in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["fetch", "nothing", "--manifest", str(manifest())])
    assert "unknown trace nothing; known are chat" in capsys.readouterr().err


def test_the_manifest_is_complete():
    sources = load_manifest()
    assert len(sources) == 9
    arrays = {"tokens", "prompt_len", "output_len", "session", "turn", "group", "shared_prefix"}
    for source in sources.values():
        assert source["format"] in FORMATS
        assert source["vocabulary"]["name"] in VOCABULARIES
        assert len(source["commit"]) == 40
        assert {*source["digests"]} == arrays
        files = [*source["files"].values(), *source["notice"].values()]
        files += [source["vocabulary"][name]["sha256"] for name in ("notice", "ranks")]
        assert all(len(digest) == 64 for digest in files)
