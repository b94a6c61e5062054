"""The plug-in in a real llama-cpp-python, with the shipped model, on a CPU: `make hosts`."""

import json
import os
import re
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from urllib.request import Request, urlopen

import pytest

from drafter_service.client.identity import model_identity
from drafter_service.plugins.llama_cpp import LOG, TESTED, SsdDraftModel, model_of
from tests.drafter_service.plugins.helpers import session_of, use_equal_steps
from tests.drafter_service.raw import eventually
from tests.servers import served

llama_cpp = pytest.importorskip("llama_cpp", reason="llama-cpp-python is not installed; `make hosts` installs it")
gguf_model = pytest.importorskip(
    "benchmarks.support.gguf_model", reason="gguf is not installed; `make hosts` installs it"
)

FOLDER = Path(__file__).parents[2] / "engine" / "models" / "assets" / "stdlib-7m"
PROMPTS = [json.loads(line)["prompt"] for line in (FOLDER / "prompts.jsonl").read_text().splitlines()[:8]]
MAX_TOKENS = 48
# The last value is the default of the host's server.
SAMPLINGS = {"greedy": {"temperature": 0.0}, "sampled": {"temperature": 0.8, "seed": 7, "repeat_penalty": 1.1}}
DEADLINE_S = 0.5


def load(file):
    return llama_cpp.Llama(str(file), n_ctx=512, n_threads=1, n_threads_batch=1, logits_all=True, verbose=False)


@pytest.fixture(scope="module")
def model_file(tmp_path_factory):
    file = tmp_path_factory.mktemp("llama") / "stdlib-7m.gguf"
    gguf_model.write_gguf(FOLDER, file)
    return file


@pytest.fixture(scope="module")
def llama(model_file):
    llama = load(model_file)
    yield llama
    llama.close()


@pytest.fixture(scope="module")
def plain(llama):
    """Return the outputs without drafts by sampling."""
    return {name: completions(llama, **sampling) for name, sampling in SAMPLINGS.items()}


@pytest.fixture
def log(caplog):
    """Return a function that returns the lines of the plug-in."""
    caplog.set_level("WARNING", LOG.logger.name)
    return lambda: [record.getMessage() for record in caplog.records if record.name == LOG.logger.name]


@pytest.fixture(autouse=True)
def equal_steps(monkeypatch):
    use_equal_steps(monkeypatch, "step_clock")


@pytest.fixture
def address(tmp_path):
    return f"unix:{tmp_path}/drafter.sock"


@contextmanager
def sidecar(address):
    with served("--listen", address, "--capacity", "200k") as process:
        yield process


@contextmanager
def drafts(llama, **settings):
    """Let a model use drafts."""
    with SsdDraftModel(llama, deadline_s=DEADLINE_S, capacity=200_000, drafting="sidecar", **settings) as ssd:
        llama.draft_model = ssd
        try:
            yield ssd
        finally:
            llama.draft_model = None
        assert ssd.counters.failures == 0


def completions(llama, **sampling):
    outputs = [llama(prompt, max_tokens=MAX_TOKENS, **sampling) for prompt in PROMPTS]
    return [output["choices"][0]["text"] for output in outputs]


def generated(llama, ids):
    """Return a greedy completion of token ids."""
    return [token for token, _ in zip(llama.generate(ids, temp=0.0), range(MAX_TOKENS), strict=False)]


def report(address):
    command = [sys.executable, "-m", "drafter_service.commands.main", "report", "--address", address, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def test_the_host_is_a_tested_version():
    assert llama_cpp.__version__ in TESTED


def test_the_corpus_of_a_file_is_that_of_other_engines(llama, model_file):
    assert model_of(llama, None) == model_identity(model_file)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_outputs_are_those_without_drafts(llama, plain, name, address, log):
    with sidecar(address):
        with drafts(llama, sidecar=address) as ssd:
            assert [completions(llama, **SAMPLINGS[name]) for _ in range(2)] == [plain[name]] * 2
            assert ssd.counters.tokens_per_step > 1.5
        (namespace,) = report(address)["namespaces"]
        assert namespace["drafting"]["accepted"] == ssd.counters.accepted
    assert log() == []


def test_a_killed_sidecar_costs_drafts_only(llama, plain, address, log):
    with sidecar(address) as process, drafts(llama, sidecar=address) as ssd:
        wait_for_connection(ssd)
        text = ""
        for at, chunk in enumerate(llama(PROMPTS[0], max_tokens=MAX_TOKENS, temperature=0.0, stream=True)):
            text += chunk["choices"][0]["text"]
            if at == 5:
                process.kill()
        assert text == plain["greedy"][0]
        assert completions(llama, temperature=0.0) == plain["greedy"]
        with sidecar(address):
            wait_for_connection(ssd)
            before = ssd.counters.accepted
            assert [completions(llama, temperature=0.0) for _ in range(2)] == [plain["greedy"]] * 2
            assert ssd.counters.accepted > before
            ssd.close()
    lost, resumed = log()
    assert "no connection" in lost
    assert "drafting resumes" in resumed


def wait_for_connection(ssd):
    session_of(ssd).open()
    drafter = session_of(ssd).namespaces.find("", "").drafter
    eventually(lambda: drafter.lost is None)


def test_a_file_without_a_vocabulary_runs_with_a_corpus_of_its_name(llama, tmp_path, address, log):
    file = tmp_path / "no-vocabulary.gguf"
    gguf_model.write_gguf(FOLDER, file, tokens=[])
    ids = [llama.tokenize(prompt.encode(), add_bos=False) for prompt in PROMPTS]
    wanted = [generated(llama, each) for each in ids]
    bare = load(file)
    with sidecar(address), drafts(bare, sidecar=address) as ssd:
        assert [[generated(bare, each) for each in ids] for _ in range(2)] == [wanted] * 2
        assert ssd.counters.accepted > 0
        (namespace,) = report(address)["namespaces"]
        assert (namespace["model"]["name"], namespace["model"]["tokenizer"]) == ("no-vocabulary", "")
    bare.close()
    (line,) = log()
    assert 'has no vocabulary; the corpus is named after the file alone; set "folder" to' in line


def test_another_tokenizer_gets_no_drafts_from_the_namespace(llama, plain, tmp_path, address, log):
    file, tokens = tmp_path / "other.gguf", gguf_model.tokens_of(FOLDER)
    gguf_model.write_gguf(FOLDER, file, tokens=[*tokens[:1000], *reversed(tokens[1000:])])
    other = load(file)
    wanted = completions(other, temperature=0.0)
    with sidecar(address), drafts(llama, sidecar=address, namespace="shared") as first:
        completions(llama, temperature=0.0)
        with drafts(other, sidecar=address, namespace="shared") as second:
            assert completions(other, temperature=0.0) == wanted
            assert second.counters.drafted == 0
        assert completions(llama, temperature=0.0) == plain["greedy"]
        assert first.counters.accepted > 0
    other.close()
    (line,) = log()
    assert "belongs to another tokenizer" in line


@contextmanager
def host_server(file, address):
    """Run the host's server with drafts; yield its URL."""
    command = [sys.executable, "-m", "drafter_service.plugins.llama_cpp.server", "--model", str(file), "--port", "0"]
    command += ["--n_ctx", "512", "--n_threads", "1", "--n_threads_batch", "1", "--verbose", "false"]
    settings = json.dumps({"sidecar": address, "drafting": "sidecar", "deadline_s": DEADLINE_S})
    process = subprocess.Popen(
        command,
        env={**os.environ, "SSD_PLUGIN": settings},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"running on (http://\S+)", line):
                break
        assert found, "".join(lines)
        yield found[1]
    finally:
        process.terminate()
        process.communicate(timeout=60)


def test_the_hosts_server_has_drafts(model_file, plain, address):
    def complete(prompt):
        body = json.dumps({"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0.8, "seed": 7}).encode()
        with urlopen(Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})) as response:
            return json.loads(response.read())["choices"][0]["text"]

    with sidecar(address), host_server(model_file, address) as url:
        for _ in range(5):  # A sidecar that compiles its kernels is looked for again after some seconds.
            assert [[complete(prompt) for prompt in PROMPTS] for _ in range(2)] == [plain["sampled"]] * 2
            (namespace,) = report(address)["namespaces"]
            if namespace["drafting"]["accepted"]:
                break
        assert namespace["drafting"]["accepted"] > 0
        assert namespace["model"]["name"] == model_file.stem
