"""The service that checks engines, over both transports, with this project's client as the engine."""

import asyncio
import threading
import time

import pytest
from click.testing import CliRunner

from drafter_service.client import DrafterClient
from drafter_service.commands.conformance import engine_side
from drafter_service.commands.conformance.engine_side import EngineChecker, run_engine_checks
from drafter_service.commands.main import cli
from drafter_service.observability.facts import ModelIdentity
from drafter_service.transport.address import Address
from tests.drafter_service.commands.conformance.mini_engine import LENGTH, PROMPT, VOCAB_SIZE, MiniEngine
from tests.drafter_service.fake_engine import FakeEngine, Request
from tests.drafter_service.raw import eventually
from tests.strategies import array

PROMPTS = (PROMPT, [5, 6])
MAX_RUNS = 100


class RunningChecks(threading.Thread):
    """The checks of an engine at an address, in a thread."""

    def __init__(self, address, idle_s=10):
        super().__init__(daemon=True)
        self.checker = EngineChecker()
        self.address = ""
        self.is_ready = threading.Event()
        self._arguments = Address.parse(address), self.checker, idle_s, self._ready
        self.start()
        assert self.is_ready.wait(10)

    @property
    def is_done(self):
        """Whether everything was tested, and the end of every sequence has arrived: a late answer delays it."""
        return self.checker.is_settled and not any(stream.running for stream in list(self.checker._streams))

    def _ready(self, address):
        self.address = address
        self.is_ready.set()

    def run(self):
        asyncio.run(run_engine_checks(*self._arguments))


def output(prompt):
    text = list(prompt)
    while len(text) < len(prompt) + LENGTH:
        text.append(MiniEngine.target(None, text))
    return text


def run_together(client, prompts, first_id):
    """Run one request for each prompt."""
    engine = FakeEngine()
    for number, prompt in enumerate(prompts, first_id):
        engine.running[number] = Request(output(prompt), len(prompt))
        client.start(number, array(prompt))
    ids = list(engine.running)
    drafts = client.draft(engine.progress(ids, [0] * len(ids)))
    while ids:
        engine.verify(ids, drafts)
        for number in [number for number in ids if engine.limit(number, 1) == 0]:
            engine.finish(client, number)
        ids = list(engine.running)
        drafts = client.draft(engine.progress(ids, [engine.limit(number, 8) for number in ids]))


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_the_client_passes(transport, socket_address, monkeypatch):
    monkeypatch.setattr(engine_side, "LATE_S", 0.1)
    running_checks = RunningChecks(socket_address if transport == "socket" else "127.0.0.1:0")
    model = ModelIdentity("m", "t", "", VOCAB_SIZE)
    with DrafterClient(running_checks.address, deadline_s=0.02, model=model) as client:
        assert client.transport == transport
        for run in range(MAX_RUNS):
            eventually(lambda: client.lost is None)
            run_together(client, PROMPTS, 10 * run)
            time.sleep(0.005)  # For the last ends, and so that few runs end while an answer is late.
            if running_checks.is_done:
                break
    running_checks.join(20)
    assert running_checks.checker.checks.failures == {}


def test_the_command_says_what_was_not_tested(socket_address):
    result = CliRunner().invoke(cli, ["conformance", "--listen", socket_address, "--idle", "0.1"])
    assert result.exit_code == 1
    assert f"listening at {socket_address}" in result.output
    assert "FAIL  hello: not tested; no engine has connected" in result.output


@pytest.mark.parametrize("arguments", [[], ["--listen", "unix:/x", "--connect", "unix:/y"]])
def test_the_command_needs_one_address(arguments):
    result = CliRunner().invoke(cli, ["conformance", *arguments])
    assert "give one of --listen" in result.stderr
