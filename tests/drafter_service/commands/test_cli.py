"""Commands of `ssd-drafter` against a real server, and their error messages."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafter_service.auth.callers import sha256_of
from drafter_service.auth.connector import ClientAccess
from drafter_service.client import DrafterClient
from drafter_service.client.identity import model_identity
from drafter_service.commands import main as cli
from drafter_service.observability.facts import ModelIdentity
from drafter_service.settings.tree import AccessConfig, SnapshotsConfig, load_settings
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceServicer
from ssd.config import DrafterConfig
from ssd.corpus.snapshot import load
from ssd.types import ROOT
from tests.certificates import Authority
from tests.drafter_service.ingest.loads import MODEL
from tests.drafter_service.observability.report.samples import reporting
from tests.drafter_service.raw import batch, connected, drafted, drafts_in, eventually, start
from tests.servers import served, serving

TEXT, OTHER = list(range(1000, 1040)), list(range(2000, 2040))


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command in this process and returns its exit code, stdout and stderr."""
    # Otherwise the command would redirect the logs of all tests.
    monkeypatch.setattr("drafter_service.observability.logs.configure_logs", lambda *_: None)

    def run(*arguments, answer=""):
        monkeypatch.setattr(sys, "argv", ["ssd-drafter", *map(str, arguments)])
        monkeypatch.setattr("click.termui.visible_prompt_func", lambda _: answer)
        try:
            cli.main()
        except SystemExit as ended:
            code = ended.code
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture(scope="module")
def service():
    """Yield a server that requires tokens; the caller `admin` has all rights, `reader` has one."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        path = Path(folder)
        address, callers = f"unix:{folder}/drafter.sock", path / "callers.toml"
        entries = []
        for name, rights in (("admin", '["read", "learn", "admin"]'), ("reader", '["read"]')):
            (path / name).write_text(f"{name}\n")
            entries.append(
                f'[[caller]]\nname = "{name}"\ntoken_sha256 = "{sha256_of(name)}"\n'
                f'namespaces = ["*"]\nrights = {rights}\n'
            )
        callers.write_text("".join(entries))
        snapshots, access = SnapshotsConfig(folder=path / "snapshots"), AccessConfig(callers=callers)
        drafting = DrafterConfig(capacity=100_000)
        with serving(listen=address, drafting=drafting, access=access, snapshots=snapshots):
            yield SimpleNamespace(
                address=address,
                folder=path / "snapshots",
                admin=["--address", address, "--token-file", path / "admin"],
                reader=["--address", address, "--token-file", path / "reader"],
                token=[("authorization", "Bearer admin")],
            )


class OldService(DrafterServiceServicer):
    """Answers as services up to 0.2.0, which neither count what they forget nor name the namespace of `Observe`."""

    def Forget(self, _request, _context):  # noqa: N802
        return pb.ForgetResponse()

    def Observe(self, _request, _context):  # noqa: N802
        return pb.ObserveResponse(texts=1, tokens=5)


def test_services_that_count_less_are_understood(run, socket_address, tmp_path):
    log = tmp_path / "a.py"
    log.write_text("a = 1")
    with reporting(socket_address, OldService()):
        assert run("forget", "a", "--request", "r", "--address", socket_address) == (0, "forgotten\n", "")
        code, _, err = run("warm", "--address", socket_address, "--tokenizer", MODEL, "--from", log, "--quiet")
    assert (code, re.search("into the namespace (.*)", err)[1]) == (0, f"of {model_identity(MODEL).name} by default")


def test_namespace_is_listed_saved_forgotten_and_dropped(run, service):
    assert run("namespaces", *service.admin)[1] == "there is no namespace that you may read\n"
    nothing = "nothing to save: no namespace that you may administer is in memory\n"
    assert run("snapshot", *service.admin) == (0, nothing, "")
    with connected(service.address, service.token) as caller:
        caller.observe("team-a", TEXT, OTHER, names=["one", "two"])
        eventually(lambda: caller.probe("team-a", TEXT[:8], 1) == [TEXT[8]])
        code, out, _ = run("namespaces", *service.admin)
        assert code == 0
        assert re.search(r"namespace +model +tokens +capacity +memory +streams +idle", out)
        assert re.search(r"team-a +82 +100,000 +\d+ MB", out)
        caller.observe(long := "n" * 100, TEXT)
        assert long in run("namespaces", *service.admin)[1], "names are not cut"
        model = ModelIdentity(name="m[/b]\x1b[2J")
        access = ClientAccess(token=service.folder.parent / "admin")
        DrafterClient(service.address, model=model, namespace="team-b", access=access).close()
        assert re.search(r"team-b +m\[/b\]\ufffd\[2J +0 ", run("namespaces", *service.admin)[1])

        code, out, _ = run("snapshot", *service.admin, "--namespace", "team-a")
        assert re.fullmatch(r"team-a: [\d.]+ MB in [\d.]+ s\n", out)
        assert (service.folder / "team-a" / "corpus.ssd").exists()

        printed = "forgotten: 1 text, and the snapshot saved again\n"
        assert run("forget", "team-a", "--request", "one", *service.admin) == (0, printed, "")
        unknown = "namespace team-a has no text with the name 'one'\n"
        assert run("forget", "team-a", "--request", "one", *service.admin) == (1, "", unknown)
        assert caller.probe("team-a", TEXT[:8], 1) == []
        assert caller.probe("team-a", OTHER[:8], 1) == [OTHER[8]]
        assert run("forget", "team-a", "--older-than", "3600", *service.admin) == (0, "nothing to forget\n", "")
        assert caller.probe("team-a", OTHER[:8], 1) == [OTHER[8]]
        assert run("forget", "team-a", "--everything", *service.admin) == (0, printed, "")
        assert caller.probe("team-a", OTHER[:8], 1) == []
        assert re.search(r"team-a +0 +100,000", run("namespaces", *service.admin)[1])

        code, out, _ = run("drop", "team-a", *service.admin, answer="n")
        assert code == 1
        assert (service.folder / "team-a").exists()
        assert run("drop", "team-a", "--yes", *service.admin) == (0, "dropped team-a\n", "")
        assert not (service.folder / "team-a").exists()


def test_damaged_files_are_set_aside_shown_and_deleted_by_a_command_alone(run, service):
    folder = service.folder / "damaged"
    folder.mkdir()
    (folder / "corpus.ssd").write_bytes(b"no snapshot")
    with connected(service.address, service.token) as caller:
        caller.observe("damaged", TEXT, names=["one"])
        caller.call("Snapshot", namespace="damaged")
    assert re.search(r"damaged .* 1 damaged", run("namespaces", *service.admin)[1])
    code, out, _ = run("forget", "damaged", "--everything", *service.admin)
    assert code == 0
    assert "may still contain the text: corpus.refused; to delete them: ssd-drafter drop damaged --set-aside" in out
    with connected(service.address, service.token) as caller:
        assert json.loads(caller.call("Report").json)["service"]["set_aside"] == {"damaged": ["corpus.refused"]}
    assert "Damaged files of damaged were set aside: corpus.refused" in run("report", *service.admin)[1]
    code, out, _ = run("drop", "damaged", "--set-aside", *service.admin, answer="n")
    assert code == 1
    assert (folder / "corpus.refused").read_bytes() == b"no snapshot"
    assert run("drop", "damaged", "--set-aside", "--yes", *service.admin) == (0, "deleted corpus.refused\n", "")
    assert sorted(path.name for path in folder.iterdir()) == ["corpus.ssd", "namespace.json"]
    assert run("drop", "damaged", "--set-aside", "--yes", *service.admin) == (0, "deleted nothing\n", "")
    assert run("drop", "damaged", "--yes", *service.admin) == (0, "dropped damaged\n", "")
    assert not folder.exists()


def test_names_survive_snapshots_that_are_learned(run, service, tmp_path):
    log, original, copy = tmp_path / "log.jsonl", tmp_path / "a.ssd", tmp_path / "b.ssd"
    log.write_text('{"id": "req-1", "choices": [{"text": "The sea is blue."}]}\n')
    for source, target in (([log, "--tokenizer", MODEL], original), ([original], copy)):
        assert run("warm", "--snapshot", target, "--capacity", "10k", "--from", *source)[0] == 0
    known = re.compile(r"documents already known +│ +1 ")
    assert known.search(run("warm", "--snapshot", copy, "--tokenizer", MODEL, "--from", log)[1])
    warm = ["warm", "--namespace", "warmed", *service.admin]
    assert run(*warm, "--from", copy)[0] == 0
    assert known.search(run(*warm, "--tokenizer", MODEL, "--from", log)[1])
    assert run("forget", "warmed", "--request", "req-1", *service.admin)[:2] == (
        0,
        "forgotten: 1 text, and the snapshot saved again\n",
    )
    assert run("drop", "warmed", "--yes", *service.admin)[0] == 0


def test_the_corpus_of_a_running_service_is_not_written(run, service, tmp_path):
    log, folder, link = tmp_path / "log.jsonl", service.folder / "team-c", tmp_path / "link.ssd"
    log.write_text('{"output_token_ids": [1, 2, 3]}\n')
    folder.mkdir()
    link.symlink_to(folder / "corpus.ssd")
    for target in (folder / "corpus.ssd", link):
        code, out, err = run("warm", "--snapshot", target, "--capacity", "10k", "--from", log)
        assert (code, out) == (2, "")
        assert f"a service uses {service.folder}" in err
        assert "--namespace NAME" in err
    assert not (folder / "corpus.ssd").exists()
    folder.rmdir()
    # A copy beside it, and the folder of a service that has ended, may be written.
    (tmp_path / ".lock").touch()
    for target in (tmp_path / "copy.ssd", tmp_path / "team-c" / "corpus.ssd"):
        target.parent.mkdir(exist_ok=True)
        assert run("warm", "--snapshot", target, "--capacity", "10k", "--from", log)[0] == 0


NEW = ["serve", "--listen", "unix:{new}"]
ERRORS = [
    (["namespaces", "--address", "{address}"], "refused: a bearer token is needed"),
    (["snapshot", "--address", "{address}", "--token-file", "/nowhere"], "token: cannot read /nowhere"),
    (["drop", "a", "--yes", "{reader}"], "refused: caller 'reader' has no admin right to namespace 'a'"),
    (["drop", "a", "--yes", "{admin}"], "refused: there is no namespace 'a'"),
    (["forget", "a", "{admin}"], "give one of --request, --older-than and --everything"),
    (["forget", "a", "--everything", "--request", "r", "{admin}"], "give one of --request, --older-than and"),
    (["snapshot", "{reader}"], "refused: caller 'reader' has no admin right to any namespace"),
    (
        ["health", "--address", "unix:/nowhere.sock", "--wait", "0.01"],
        "no drafter answers at unix:/nowhere.sock (no answer",
    ),
    (["health", "--address", "nonsense"], "'nonsense' is not an address"),
    (["health", "--address", "unix:/nowhere.sock"], "start one with: ssd-drafter serve"),
    (["namespaces", "--address", "{address}", "--key", "k"], "--key needs certificate"),
    (["namespaces", "--address", "127.0.0.1:1", "--ca", "/nowhere"], "ca: cannot read /nowhere"),
    (["namespaces", "--address", "10.0.0.1:1", "--token-file", "{token}"], "the token would be sent to 10.0.0.1:1"),
    (["serve", "--listen", "nonsense"], "'nonsense' is not an address"),
    (["serve", "--listen", "host:99999"], "is not an address"),
    (["serve", "--listen", "unix:/nowhere/at/all.sock"], "there is no directory /nowhere/at"),
    (["serve", "--listen", "unix:{file}"], "exists and is not a socket"),
    (["serve", "--listen", "unix:{new}" + "x" * 100], "is too long for a Unix socket"),
    (["serve", "--listen", "0.0.0.0:0"], "is open to the network"),
    (["serve", "--listen", "{address}"], "is in use by another server; stop that one or choose another path"),
    (["serve", "--listen", "127.0.0.1:{taken}"], "cannot listen at 127.0.0.1:{taken}: Address already in use; choose"),
    (["serve", "--config", "{new}"], "cannot read the settings in {new}: No such file"),
    ([*NEW, "--set", "limits.stream=5"], "there is no setting limits.stream; did you mean"),
    ([*NEW, "--set", "namespaces.capacities={a = '200M', b = '200M'}"], "3,025,000,000 of the limit"),
    ([*NEW, "--snapshot-folder", "{file}/x"], "snapshots.folder: cannot write to"),
    ([*NEW, "--snapshot-folder", "{folder}"], "uses {folder}; give each service its own folder"),
    ([*NEW, "--key", "{file}", "--certificate", "{file}"], "are not a pair in PEM form"),
    ([*NEW, "--callers", "{file}"], "callers: {file}"),
]


@pytest.mark.parametrize(("arguments", "error"), ERRORS)
def test_errors_are_one_line_with_exit_code_2(run, service, tmp_path, monkeypatch, arguments, error):
    monkeypatch.setattr("drafter_service.commands.admin.HEALTH_TIMEOUT_S", 0.1)
    lists = {"{admin}": service.admin, "{reader}": service.reader, "{token}": service.admin[-1:]}
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        names = {"file": tmp_path / "file", "new": tmp_path / "s", "address": service.address, "folder": service.folder}
        names["taken"] = taken.getsockname()[1]

        def filled(text):
            for name, value in names.items():
                text = text.replace(f"{{{name}}}", str(value))
            return text

        code, out, err = run(*(filled(str(part)) for each in arguments for part in lists.get(each, [each])))
    assert code == 2
    assert "listening" not in out
    assert re.fullmatch(f"error: .*{re.escape(filled(error))}.*\n", err)
    # The server at the address keeps running.
    monkeypatch.setattr("drafter_service.commands.admin.HEALTH_TIMEOUT_S", 60)
    assert run("health", "--address", service.address) == (0, "serving\n", "")
    assert not list(tmp_path.glob("s*"))


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--older-than", "-1", "forget"], "No such option"),
        (["forget", "a", "--older-than", "-1"], "'--older-than': -1.0 is not in the range"),
        (["health", "--wait", "inf"], "'--wait': inf is not in the range 0<=x<=86400"),
        (["forget"], "Missing argument 'NAMESPACE'"),
        (["unknown"], "No such command 'unknown'"),
        (["serve", "--capacity", "many"], "'--capacity': 'many' is not a number such as 16000000, 500k or 16M"),
    ],
)
def test_usage_errors_are_explained(run, arguments, error):
    code, out, err = run(*arguments)
    assert (code, out) == (2, "")
    assert error in err.splitlines()[-1]


def test_printed_settings_are_read_back(run, tmp_path):
    ca = Authority(tmp_path)
    pair = ca.server()
    arguments = [
        *["--listen", "unix:/tmp/x.sock", "--capacity", "32M", "--max-draft", "8"],
        *["--memory-limit", "8G", "--snapshot-folder", "/snapshots"],
        *["--log", "redis://somewhere", "--metrics", "127.0.0.1:9", "--certificate", pair.certificate],
        *["--key", pair.key, "--client-ca", ca.certificate, "--callers", "/callers.toml", "--allow-plaintext"],
        *["--socket-mode", "0660", "--log-level", "debug", "--log-format", "json"],
        *["--set", "limits.streams=3", "--set", "namespaces.capacities={'a.b' = '1M'}"],
        *["--set", "drafting.draft_shape=tree"],
    ]
    code, printed, _ = run("serve", *arguments, "--print-config")
    assert code == 0
    file = tmp_path / "settings.toml"
    file.write_text(printed)
    config = load_settings(file, environment={})
    assert (config.drafting.capacity, config.drafting.draft_shape, config.limits.streams) == (32_000_000, "tree", 3)
    assert (config.access.certificate, config.namespaces.capacities) == (pair.certificate, {"a.b": 1_000_000})
    assert run("serve", "--config", file, "--print-config")[1] == printed
    # Flags override the file.
    assert "max_draft = 9" in run("serve", "--config", file, "--max-draft", "9", "--print-config")[1]


def test_summaries_of_commands_are_not_cut(run):
    commands = run("--help")[1].partition("Commands:\n")[2]
    assert "advise" in commands
    assert "..." not in commands


HELP = """
import sys
from click.testing import CliRunner
from drafter_service.commands.main import cli
for command in ([], ["serve"], ["forget"], ["health"], ["token"]):
    result = CliRunner().invoke(cli, [*command, "--help"])
    assert result.exit_code == 0, result.output
    assert not {"numba", "torch", "grpc", "numpy"} & set(sys.modules), (command, sorted(sys.modules))
"""


def test_help_imports_no_heavy_modules():
    subprocess.run([sys.executable, "-c", HELP], check=True, timeout=60)


def test_a_server_replaces_a_stale_socket_applies_its_options_and_saves_when_it_stops(run, socket_address, tmp_path):
    path = Path(socket_address.removeprefix("unix:"))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(path))
    options = ["--set", "drafting.draft_shape=tree", "--set", "drafting.cost=0.0001", "--max-draft", "5"]
    options += ["--capacity", "100k", "--log-format", "json", "--snapshot-folder", str(tmp_path)]
    with ThreadPoolExecutor(1) as pool, ExitStack() as stack:
        health = pool.submit(run, "health", "--address", socket_address, "--wait", "60")
        process = stack.enter_context(served("--listen", socket_address, *options))
        assert "up to 100,000 tokens" in process.greeting
        assert health.result(60) == (0, "serving\n", "")
        assert path.stat().st_mode & 0o777 == 0o600
        with connected(socket_address) as caller:
            caller.observe("a", TEXT)
            stream = caller.stream("a")
            assert stream.welcome.max_draft == 5
            request = batch({1: ()}, limit=9)
            response = stream.exchange(starts=[start(1, [1, 2, 3, 1, 2, 4, 1, 2])], batch=request)
            drafts = drafts_in(response.drafts, 1)
            assert len(drafts.tokens) == 5
            assert {*drafts.tokens[drafts.parents == ROOT].tolist()} == {3, 4}
            assert drafted(stream.exchange(batch=batch({1: ()}, limit=9, cost=1.0))) == []
            process.send_signal(signal.SIGINT)
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0
            assert re.fullmatch(r"stopped; tokens: 0 committed, 0 drafted, 0 accepted, 0\.00 per step\n", out)
            log = [json.loads(line) for line in os.pread(process.log.fileno(), 1 << 16, 0).decode().splitlines()]
            assert log[0]["event"] == "namespace loaded"
            assert {line["level"] for line in log} == {"info"}
            # The stream was ended without an error.
            stream.end()
    assert load(tmp_path / "a" / "corpus.ssd", 100_000, 32).corpus.requests == 1
