"""The service that checks engines, over both transports, with this project's client as the engine."""

import asyncio
import threading

import pytest
from click.testing import CliRunner

from drafter_service.client import DrafterClient
from drafter_service.commands.conformance import simulated_service
from drafter_service.commands.conformance.engine_side import EngineChecker
from drafter_service.commands.conformance.simulated_service import run_engine_checks
from drafter_service.commands.main import cli
from drafter_service.observability.facts import ModelIdentity
from drafter_service.transport.address import Address
from ssd.replay import replay
from tests.drafter_service.commands.conformance.mini_engine import LENGTH, PROMPT, VOCAB_SIZE, MiniEngine
from tests.replay import recording_of
from tests.waiting import TIMEOUT_S, eventually

PROMPTS = (PROMPT, [5, 6])
MAX_RUNS = 100


class RunningChecks(threading.Thread):
    """The checks of an engine at an address, in a thread."""

    def __init__(self, address):
        super().__init__(daemon=True)
        self.checker = EngineChecker()
        self.address = ""
        self.is_ready = threading.Event()
        self._arguments = Address.parse(address), self.checker, TIMEOUT_S, self._ready
        self.start()
        assert self.is_ready.wait(TIMEOUT_S)

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
    return text[len(prompt) :]


@pytest.mark.parametrize("transport", ["socket", "grpc"])
def test_the_client_passes(transport, socket_address, monkeypatch):
    monkeypatch.setattr(simulated_service, "LATE_S", 1.5)
    running_checks = RunningChecks(socket_address if transport == "socket" else "127.0.0.1:0")
    model = ModelIdentity("m", "t", "", VOCAB_SIZE)
    recording = recording_of([(prompt, output(prompt)) for prompt in PROMPTS])
    with DrafterClient(running_checks.address, deadline_s=0.5, model=model) as client:
        assert client.transport == transport
        for _ in range(MAX_RUNS):
            eventually(lambda: client.lost is None)
            replay(recording, client, concurrency=len(PROMPTS), max_draft=8)
            # A late answer delays the ends, and leaves the rest of its run without drafts.
            eventually(lambda: not client._protocol.pending.has_pending)
            if running_checks.is_done:
                break
    running_checks.join(2 * TIMEOUT_S)
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
