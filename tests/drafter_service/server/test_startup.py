"""The service before it is ready: it listens, refuses calls, and says what it does."""

import asyncio
import gc
import os
import signal

import grpc
import pytest
from click.testing import CliRunner

from drafter_service.client import DrafterClient
from drafter_service.commands.main import cli
from drafter_service.server import server, startup
from drafter_service.server.listener import Listener
from drafter_service.settings.tree import LogConfig, ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from ssd.errors import UserError
from tests.drafter_service.guarded import run
from tests.drafter_service.server.opened_namespaces import raising


def health(address, *arguments):
    done = CliRunner().invoke(cli, ["health", "--address", address, *arguments])
    return done.exit_code, done.output.strip()


async def starting(monkeypatch, address):
    """Start a service that compiles kernels until an event is set; return its task, the event, and its lines."""
    is_compiled, reached, lines = asyncio.Event(), asyncio.Event(), []

    async def load(listener, notify):
        listener.state = "compiling kernels, 40 %"
        notify(listener.state)
        reached.set()
        await is_compiled.wait()
        return server

    monkeypatch.setattr(startup, "_load_server", load)
    task = asyncio.create_task(startup.run_service(ServiceConfig(listen=address), lines.append, lines.append))
    await reached.wait()
    return task, is_compiled, lines


@run
async def test_health_and_calls_say_that_kernels_are_compiled(monkeypatch, socket_address):
    task, is_compiled, lines = await starting(monkeypatch, socket_address)
    state = f"the drafter at {socket_address} is not ready: compiling kernels, 40 %"
    assert await asyncio.to_thread(health, socket_address) == (2, f"error: {state}")
    listed = await asyncio.to_thread(CliRunner().invoke, cli, ["namespaces", "--address", socket_address])
    assert listed.stderr == f"error: {state}\n"
    for timeout_s in (0.3, 3, 30):  # On a busy machine, there may be no answer in a short time.
        monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", timeout_s)
        with pytest.raises(UserError) as refused:
            await asyncio.to_thread(DrafterClient, socket_address)
        if "no response in time" not in str(refused.value):
            break
    assert str(refused.value) == state
    async with grpc.aio.insecure_channel(socket_address) as channel:
        for call in (
            DrafterServiceStub(channel).Report(pb.ReportRequest()),
            DrafterServiceStub(channel).Draft(iter([pb.DraftRequest()])).read(),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await call
            assert error.value.code() is grpc.StatusCode.UNAVAILABLE
            assert error.value.details() == "not ready: compiling kernels, 40 %"
    waiting = asyncio.create_task(asyncio.to_thread(health, socket_address, "--wait", "60"))
    is_compiled.set()
    assert await waiting == (0, "serving")
    assert lines == ["compiling kernels, 40 %", socket_address]
    os.kill(os.getpid(), signal.SIGTERM)
    stopped = await task
    assert stopped.summary.startswith("stopped; ")


@run
async def test_a_client_that_is_not_required_connects_once_the_service_is_ready(monkeypatch, socket_address):
    task, is_compiled, _ = await starting(monkeypatch, socket_address)
    losses = []
    client = DrafterClient(socket_address, required=False, on_lost=losses.append)
    while not losses:
        await asyncio.sleep(0.01)
    assert losses == ["not ready: compiling kernels, 40 %"]
    is_compiled.set()
    while client.lost is not None:
        await asyncio.sleep(0.01)
    await asyncio.to_thread(client.close)
    os.kill(os.getpid(), signal.SIGTERM)
    await task


@run
async def test_the_shared_log_is_checked_before_kernels_are_compiled(monkeypatch, socket_address):
    monkeypatch.setattr(startup, "_load_server", None)
    config = ServiceConfig(listen=socket_address, log=LogConfig(url="http://host"))
    with pytest.raises(UserError, match="the URL of the shared log must begin with redis://"):
        await startup.run_service(config, print, print)


@run
async def test_a_service_that_cannot_start_stops_listening(monkeypatch, socket_address):
    monkeypatch.setattr(startup, "_load_server", raising(UserError("no folder for kernels")))
    with pytest.raises(UserError, match="no folder for kernels"):
        await startup.run_service(ServiceConfig(listen=socket_address), print, print)
    assert "no drafter answers" in (await asyncio.to_thread(health, socket_address))[1]


@run
async def test_modules_and_kernels_are_left_out_of_garbage_collections(socket_address):
    try:
        assert await startup._load_server(Listener(ServiceConfig(listen=socket_address)), print) is server
        tracked = {id(each) for each in gc.get_objects()}
        assert not {id(vars(server)), id(server.DrafterServer)} & tracked
    finally:
        gc.unfreeze()
