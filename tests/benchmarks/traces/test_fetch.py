"""Traces are downloaded from an HTTP server, continued after interruptions, and checked."""

import base64
import hashlib
import json
import shutil
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from benchmarks.traces import load_trace
from benchmarks.traces.__main__ import main
from benchmarks.traces.conversion import VOCABULARIES
from benchmarks.traces.fetching import DownloadError, Remote, download, fetch, load_manifest
from benchmarks.traces.formats import FORMATS
from tests.benchmarks.traces.byte_encoder import ByteEncoder

ANSWERS = b"\n".join(
    json.dumps({"uid": str(number), "messages": [{"content": "q"}, {"content": {"answer": f"a{number}"}}]}).encode()
    for number in range(5)
)
BYTES = b"\n".join(base64.b64encode(bytes([byte])) + f" {byte}".encode() for byte in range(256))
PATHS = {
    "/raw.githubusercontent.com/owner/name/c0ffee/LICENSE": b"Do what you like.",
    "/raw.githubusercontent.com/owner/name/c0ffee/data/a%2Bb%3D1.jsonl": ANSWERS,
    "/ranks.example/o200k.tiktoken": BYTES,
    "/ranks.example/LICENSE": b"MIT",
}


class Server(ThreadingHTTPServer):
    """Serves PATHS. `cut`: number of answers that end after 10 bytes."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.paths, self.cut, self.paths_read = dict(PATHS), 0, []

    @property
    def url(self):
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        server = self.server
        server.paths_read.append(self.path)
        if self.path not in server.paths:
            self.send_error(404)
            return
        content = server.paths[self.path]
        self.send_response(200)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if server.cut:
            server.cut -= 1
            content = content[:10]
            self.close_connection = True
        self.wfile.write(content)

    def log_message(self, *_arguments):
        """Print nothing."""


@pytest.fixture
def server():
    server = Server()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


def entry(content):
    return {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}


@pytest.fixture
def manifest_path(tmp_path):
    """A manifest of one trace, whose digests are not known yet."""
    ranks = {"url": "https://ranks.example/o200k.tiktoken"} | entry(BYTES)
    notice = {"url": "https://ranks.example/LICENSE"} | entry(b"MIT")
    trace = {
        "repository": "owner/name",
        "commit": "c0ffee",
        "licence": "MIT",
        "format": "arena-hard",
        "vocabulary": "o200k",
        "notice": {"LICENSE": entry(b"Do what you like.")},
        "files": {"data/a+b=1.jsonl": entry(ANSWERS)},
        "requests": 5,
        "prompt_tokens": 5 * 19,
        "output_tokens": 5 * 3,
        "digests": {},
    }
    path = tmp_path / "manifest.json"
    vocabularies = {"o200k": {"ranks": ranks, "licence": "MIT", "notice": notice}}
    path.write_text(json.dumps({"vocabularies": vocabularies, "traces": {"chat": trace}}))
    return path


def remote(content):
    return Remote("https://ranks.example/o200k.tiktoken", hashlib.sha256(content).hexdigest(), len(content))


def fetched(manifest_path, folder, server):
    """Fetch the trace of the manifest, and return its differences."""
    [(name, source)] = load_manifest(manifest_path).items()
    folder.mkdir(exist_ok=True)
    return fetch(name, source, folder, server.url, lambda *_: ByteEncoder())


def test_a_trace_is_made_with_its_licences(manifest_path, tmp_path, server):
    assert fetched(manifest_path, tmp_path / "traces", server) == []
    trace = load_trace(tmp_path / "traces" / "chat.npz")
    assert len(trace.requests) == 5
    assert sorted(bytes(request.output[:-1].tolist()) for request in trace.requests) == [
        b"a%d" % number for number in range(5)
    ]
    licences = {path.name: path.read_text() for path in (tmp_path / "traces" / "licences").iterdir()}
    assert licences == {"chat.txt": "Do what you like.", "o200k.txt": "MIT"}


def test_what_is_there_is_not_downloaded_again(manifest_path, tmp_path, server):
    fetched(manifest_path, tmp_path, server)
    before = len(server.paths_read)
    fetched(manifest_path, tmp_path, server)
    (tmp_path / "chat.npz").unlink()
    fetched(manifest_path, tmp_path, server)
    assert len(server.paths_read) == before
    assert (tmp_path / "chat.npz").exists()


def test_differences_from_the_manifest_are_named(manifest_path, tmp_path, server):
    document = json.loads(manifest_path.read_text())
    document["traces"]["chat"] |= {"requests": 6, "digests": {"tokens": "0" * 64}}
    manifest_path.write_text(json.dumps(document))
    assert fetched(manifest_path, tmp_path, server) == ["5 requests, not 6", "array tokens"]


def test_a_download_is_tried_again_if_the_connection_is_lost(tmp_path, server):
    server.cut = 3
    with pytest.raises(DownloadError, match="the same command continues"):
        download(remote(BYTES), tmp_path / "ranks", server.url)
    assert list(tmp_path.iterdir()) == []
    server.cut = 2
    download(remote(BYTES), tmp_path / "ranks", server.url)
    assert (tmp_path / "ranks").read_bytes() == BYTES


def test_another_file_than_expected_is_refused_and_not_kept(tmp_path, server):
    server.paths["/ranks.example/o200k.tiktoken"] = BYTES[::-1]
    with pytest.raises(DownloadError, match="another file than expected"):
        download(remote(BYTES), tmp_path / "ranks", server.url)
    assert list(tmp_path.iterdir()) == []
    server.paths["/ranks.example/o200k.tiktoken"] = BYTES
    download(remote(BYTES), tmp_path / "ranks", server.url)
    assert (tmp_path / "ranks").read_bytes() == BYTES


def test_a_missing_file_is_an_error(tmp_path, server):
    server.paths.clear()
    with pytest.raises(DownloadError, match="404"):
        download(remote(BYTES), tmp_path / "ranks", server.url)
    assert len(server.paths_read) == 1


def test_files_of_another_format_are_an_error(manifest_path, tmp_path, server):
    document = json.loads(manifest_path.read_text())
    document["traces"]["chat"]["format"] = "zero-eval"
    manifest_path.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="chat are not in the format zero-eval"):
        fetched(manifest_path, tmp_path, server)


def test_the_command_reports_each_trace(manifest_path, tmp_path, server, capsys):
    pytest.importorskip("tiktoken", reason="tiktoken (extra dev) is not installed")
    folder = tmp_path / "traces"
    arguments = ["fetch", "all", "--folder", str(folder), "--mirror", server.url, "--manifest", str(manifest_path)]
    assert main(arguments) == 0
    assert "as in the manifest" in capsys.readouterr().out
    (folder / "chat.npz").unlink()
    shutil.rmtree(folder / "sources")
    server.paths.pop("/ranks.example/o200k.tiktoken")
    assert main(arguments) == 1
    assert "404" in capsys.readouterr().out


def test_unknown_traces_are_refused(manifest_path, capsys):
    with pytest.raises(SystemExit):
        main(["fetch", "nothing", "--manifest", str(manifest_path)])
    assert "unknown trace nothing; known are chat" in capsys.readouterr().err


def test_the_manifest_is_complete():
    sources = load_manifest()
    assert len(sources) == 9
    for source in sources.values():
        assert source.format in FORMATS
        assert source.vocabulary in VOCABULARIES
        assert len(source.commit) == 40
        assert {*source.digests} == {"tokens", "prompt_len", "output_len", "session", "turn", "group", "shared_prefix"}
        assert all(len(remote.sha256) == 64 and remote.size > 0 for remote in source.remotes.values())
        assert len(source.remotes) == 3 + len(source.inputs)
