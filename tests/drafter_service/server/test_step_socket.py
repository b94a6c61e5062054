"""The step socket: how connections begin and end."""

import asyncio
import socket
import stat
import tempfile
import time
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.auth.connector import ClientAccess
from drafter_service.client import DrafterClient
from drafter_service.server.step_socket import StepSocket, StreamEndedError
from drafter_service.settings.tree import AccessConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.wire import HEADER, MAGIC, MAX_MESSAGE_BYTES, Frames, framed
from ssd.errors import UserError
from tests.certificates import Authority
from tests.descriptors import check_accepting
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import TIMEOUT_S, connected, hello
from tests.servers import serving
from tests.strategies import examples


def steps_of(address):
    return Path(address.removeprefix("unix:") + ".steps")


def connect(address):
    connection = socket.socket(socket.AF_UNIX)
    connection.settimeout(TIMEOUT_S)
    connection.connect(str(steps_of(address)))
    return connection


def end_of(connection):
    """Return the status and the reason in the last frame."""
    frames, ends = Frames(), []
    while data := connection.recv(1 << 16):
        ends += [pb.Error.FromString(body) for body, is_last in frames.feed(data) if is_last]
    [end] = ends
    return next(code for code in grpc.StatusCode if code.value[0] == end.code), end.message


def end_after(address, data, *, half_closed=False):
    """Return the status of a connection that sends these bytes."""
    with connect(address) as connection:
        connection.sendall(data)
        if half_closed:
            connection.shutdown(socket.SHUT_WR)
        return end_of(connection)


@pytest.fixture(scope="module")
def address():
    """Yield the address of a server that no test stops."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder, serving(listen=f"unix:{folder}/drafter.sock"):
        yield f"unix:{folder}/drafter.sock"


LATE = "the authorization did not arrive in time"
HANDSHAKE = framed(pb.DraftRequest(hello=hello("default")).SerializeToString())


START = MAGIC + framed(b"") + HANDSHAKE


@pytest.mark.parametrize(
    ("data", "half_closed", "code", "reason"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", False, "UNIMPLEMENTED", "serves only"),
        (MAGIC + HEADER.pack(1 << 20), False, "INVALID_ARGUMENT", "a frame has 1048576 bytes; the maximum is 8192"),
        (MAGIC[:5], True, "CANCELLED", ""),
        (MAGIC + framed(b""), True, "OK", ""),
        # Without access control no token is needed, but this header is malformed.
        (MAGIC + framed(b"Basic xyz") + HANDSHAKE, False, "UNAUTHENTICATED", "of the form: Bearer TOKEN"),
        (START + HEADER.pack(MAX_MESSAGE_BYTES + 1), False, "INVALID_ARGUMENT", "the maximum is 67108864"),
        (START + HEADER.pack(0xFFFF_FFFF), False, "INVALID_ARGUMENT", "the maximum is 67108864"),
        (START + HEADER.pack(100) + b"x", True, "OK", ""),
    ],
)
def test_data_that_is_no_stream_ends_the_connection_with_a_status(address, data, half_closed, code, reason):
    status, details = end_after(address, data, half_closed=half_closed)
    assert status.name == code
    assert reason in details
    with connected(address, over_steps=True) as caller:
        assert caller.stream("default").welcome.namespace == "default"


async def ends_of_silent_connections(address, number):
    """Return the end reasons of simultaneous connections that send nothing, to a service with a limit of two."""
    listening = StepSocket(streams=None, max_connections=2)
    await listening.start(Address(address).steps, 0o600)

    async def silent():
        reader, writer = await asyncio.open_unix_connection(steps_of(address))
        [(body, is_last)] = Frames().feed(await reader.read())
        writer.close()
        assert is_last
        return pb.Error.FromString(body).message

    ends = await asyncio.gather(*(silent() for _ in range(number)))
    await listening.stop(TIMEOUT_S)
    return sorted(ends)


def test_silent_connections_are_limited_and_time_out(socket_address, monkeypatch):
    """All but two are refused at once; these two time out."""
    monkeypatch.setattr("drafter_service.server.step_socket.AUTHORIZATION_TIMEOUT_S", 0.5)
    ends = asyncio.run(ends_of_silent_connections(socket_address, 20))
    assert ends == [LATE] * 2 + ["the service has its 2 streams already"] * 18


class ClosedStreams:
    """Ends each stream once its authorization has arrived."""

    def open(self, context):
        raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "authorized")


@run
async def test_an_authorization_that_arrives_while_the_event_loop_is_late_counts(socket_address, monkeypatch):
    listening, loop = StepSocket(ClosedStreams(), max_connections=2), asyncio.get_running_loop()
    await listening.start(Address(socket_address).steps, 0o600)
    reader, writer = await asyncio.open_unix_connection(steps_of(socket_address))
    while not listening._connections:
        await asyncio.sleep(0)
    await asyncio.sleep(0)  # The task begins to wait.
    writer.write(MAGIC + framed(b""))
    monkeypatch.setattr(loop, "time", lambda: time.monotonic() + 60)
    [(body, _)] = Frames().feed(await reader.read())
    writer.close()
    await listening.stop(TIMEOUT_S)
    assert pb.Error.FromString(body).message == "authorized"


@run
async def test_a_stale_socket_is_replaced_and_other_files_are_not(socket_address):
    steps = steps_of(socket_address)
    listening = StepSocket(streams=None, max_connections=2)
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(steps))
    await listening.start(Address(socket_address).steps, 0o600)
    await listening.stop(TIMEOUT_S)
    steps.write_text("mine")
    with pytest.raises(UserError, match="exists and is not a socket"):
        await listening.start(Address(socket_address).steps, 0o600)
    assert steps.read_text() == "mine"


def test_the_service_sets_the_mode_of_its_sockets_and_its_end_is_that_of_streams(socket_address):
    with ExitStack() as stack:
        caller = stack.enter_context(connected(socket_address, over_steps=True))
        with serving(listen=socket_address, access=AccessConfig(socket_mode="0660")):
            for path in (steps_of(socket_address), Path(socket_address.removeprefix("unix:"))):
                assert stat.S_IMODE(path.stat().st_mode) == 0o660
            stream = caller.stream("default")
        with pytest.raises(StopIteration):
            stream.read()
    assert not steps_of(socket_address).exists()


def test_with_tls_there_is_no_step_socket(tmp_path, address, socket_address, monkeypatch):
    ours = Authority(tmp_path, "ours")
    pair = ours.server("localhost")
    with serving(listen=socket_address, access=AccessConfig(pair.certificate, pair.key)):
        assert not steps_of(socket_address).exists()
        with DrafterClient(socket_address, access=ClientAccess(ca=ours.certificate)) as client:
            assert client.lost is None
    # Where there is one, a client with a CA does not use it.
    monkeypatch.setattr("drafter_service.client.client.CONNECT_TIMEOUT_S", 0.5)
    with pytest.raises(UserError):
        DrafterClient(address, access=ClientAccess(ca=ours.certificate))


class Echo:
    """Answers each message with its size: those of even sizes after a moment. Refuses empty ones."""

    is_sending = False

    @asynccontextmanager
    async def open(self, context):
        yield self

    def answer(self, data):
        if not data:
            raise StreamEndedError(grpc.StatusCode.INVALID_ARGUMENT, "it is empty")
        response = pb.DraftResponse(step=len(data)).SerializeToString()
        return self.later(response) if len(data) % 2 == 0 else response

    async def later(self, response):
        await asyncio.sleep(0.001)
        return response

    def sent(self):
        pass


@examples(20)
@given(st.lists(st.integers(1, 200_000), max_size=12), st.lists(st.integers(1, 300_000), max_size=12))
def test_requests_are_answered_in_order_however_they_arrive(sizes, cuts):
    """Requests that arrive while an answer is awaited, while the client reads nothing, and in any parts."""
    data = MAGIC + framed(b"Bearer x") + b"".join(framed(bytes(size)) for size in sizes)

    async def test(address):
        listening = StepSocket(Echo(), max_connections=1)
        await listening.start(Address(address).steps, 0o600)
        reader, writer = await asyncio.open_unix_connection(steps_of(address))
        begin = 0
        for cut in [*cuts, len(data)]:
            writer.write(data[begin : begin + cut])
            begin += cut
            await asyncio.sleep(0)
        writer.write(framed(b""))
        *answers, (end, is_last) = Frames().feed(await reader.read())
        assert [pb.DraftResponse.FromString(body).step for body, _ in answers] == sizes
        assert (pb.Error.FromString(end).message, is_last) == ("it is empty", True)
        writer.close()
        await listening.stop(TIMEOUT_S)

    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        asyncio.run(asyncio.wait_for(test(f"unix:{folder}/drafter.sock"), TIMEOUT_S))


@run
async def test_without_free_descriptors_few_attempts_to_accept_are_made(socket_address, monkeypatch):
    listening = StepSocket(None, 0)  # Every connection is refused.
    await listening.start(Address(socket_address).steps, 0o600)
    await check_accepting(lambda: connect(socket_address), monkeypatch)
    await listening.stop(0)
