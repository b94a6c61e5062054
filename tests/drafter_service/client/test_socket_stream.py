"""The client's stream over the step socket: the threads that write requests, and the end of a stream."""

import errno
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client import DrafterClient
from drafter_service.client.messages import OutgoingRequest, Registered
from drafter_service.client.sequences import SequenceInfo
from drafter_service.client.socket_stream import SLICE_BYTES, SMALL_BYTES, SocketStream, SocketWriter
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.frames import Frames, framed
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, fake_server_thread
from tests.replay import progress_of
from tests.strategies import array, examples

LONG = SMALL_BYTES // 4 + 1
"""Number of tokens of a request that is not small."""


def message(step: int, tokens: int = 0) -> OutgoingRequest:
    starts = (
        [Registered(step, SequenceInfo(array([step] * tokens), array([]), "", "", learn=True), array([]))]
        if tokens
        else []
    )
    return OutgoingRequest(pb.DraftRequest(step=step), starts)


class Pipe:
    """A socket pair with a `SocketWriter` at one end."""

    def __init__(self) -> None:
        self.near, self.far = socket.socketpair()
        for end in (self.near, self.far):
            end.setblocking(False)
        self.woken = 0
        self.writer = SocketWriter(self.near, framed(b""), self.wake)
        self.frames = Frames()
        self.arrived: list[pb.DraftRequest] = []
        self.is_over = False
        self.writer.write_some()
        self.read()
        assert self.arrived == [pb.DraftRequest()]
        self.arrived.clear()

    def wake(self) -> None:
        self.woken += 1

    def read(self) -> list[int]:
        """Return the numbers of the requests that have arrived."""
        try:
            while data := self.far.recv(1 << 20):
                self.arrived += [pb.DraftRequest.FromString(body) for body, _ in self.frames.feed(data)]
            self.is_over = True
        except BlockingIOError:
            pass
        return [one.step for one in self.arrived]

    def close(self) -> None:
        self.near.close()
        self.far.close()


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_small_requests_are_written_at_once_and_long_ones_by_the_other_thread(pipe):
    pipe.writer.send(message(1))
    assert pipe.read() == [1]
    assert (pipe.woken, pipe.writer.has_more) == (0, False)
    pipe.writer.send(message(2, LONG))
    assert pipe.woken == 1
    pipe.writer.send(message(3))
    assert pipe.read() == [1]
    while pipe.writer.has_more:
        pipe.writer.write_some()
    assert pipe.read() == [1, 2, 3]
    assert pipe.arrived[1].starts[0].prompt == array([2] * LONG).tobytes()
    pipe.writer.send(message(4))
    assert pipe.read() == [1, 2, 3, 4]


def test_a_small_request_does_not_wait_for_a_thread_that_writes(pipe):
    with pipe.writer._writing:
        pipe.writer.send(message(1))
        assert (pipe.read(), pipe.woken) == ([], 1)
    pipe.writer.write_some()
    assert pipe.read() == [1]


def test_a_long_request_is_written_a_slice_at_a_time():
    sizes = []

    class Greedy:
        def send(self, data):
            sizes.append(len(data))
            return len(data)

    writer = SocketWriter(Greedy(), b"", lambda: None)
    writer.send(message(1, SLICE_BYTES))
    for written in range(1, 5):
        writer.write_some()
        assert sizes == [SLICE_BYTES] * written
    writer.write_some()
    assert sizes[-1] < SLICE_BYTES
    assert not writer.has_more


@examples(50)
@given(st.lists(st.sampled_from(["small", "long", "write", "read"]), max_size=40))
def test_requests_keep_their_order(events):
    pipe = Pipe()
    sent = 0
    for event in events:
        if event == "write":
            pipe.writer.write_some()
        elif event == "read":
            pipe.read()
        else:
            sent += 1
            pipe.writer.send(message(sent, 50_000 if event == "long" else 0))
    while pipe.writer.has_more:
        pipe.writer.write_some()
        pipe.read()
    assert pipe.read() == list(range(1, sent + 1))
    pipe.close()


def test_the_end_is_written_after_all_requests(pipe):
    pipe.writer.send(message(1, LONG))
    pipe.writer.end()
    assert pipe.woken == 2
    while pipe.writer.has_more:
        pipe.writer.write_some()
    assert pipe.read() == [1]
    assert pipe.is_over


def test_a_broken_connection_empties_the_queue(pipe):
    pipe.far.close()
    pipe.writer.send(message(1))
    pipe.writer.send(message(2, LONG))
    pipe.writer.write_some()
    assert not pipe.writer.has_more
    pipe.writer.send(message(3, LONG))
    assert not pipe.writer.has_more


def test_closing_a_stream_ends_the_waits():
    near, far = socket.socketpair()
    stream = SocketStream(near, "")
    assert not stream.wait(0.0)
    assert not stream.wait(0.002)
    near.close()  # As if `close` had been called after `wait` had found the stream open.
    assert stream.wait(TIMEOUT_S)
    stream.close()
    assert stream.wait(TIMEOUT_S)
    assert stream.receive() == []
    assert stream.failure is None
    far.close()


def test_a_stream_that_cannot_be_made_closes_its_connection(monkeypatch):
    near, far = socket.socketpair()

    def refuse():
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("drafter_service.client.socket_stream.socket.socketpair", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        SocketStream(near, "")
    assert near.fileno() == -1
    far.close()


def test_a_lack_of_descriptors_does_not_select_grpc(socket_address, monkeypatch):
    Path(socket_address.removeprefix("unix:") + ".steps").touch()
    connector = Connector(Address.parse(socket_address), ClientAccess())
    assert connector.connect_steps(TIMEOUT_S) is None

    def refuse(*_):
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("drafter_service.auth.connector.socket.socket", refuse)
    with pytest.raises(OSError, match="Too many open files"):
        connector.connect_steps(TIMEOUT_S)


def test_long_requests_are_serialized_by_the_other_thread_without_the_lock(socket_address, monkeypatch):
    """The engine's thread does not wait for the serialization."""
    seen = []
    whole = OutgoingRequest.message

    def watched(outgoing):
        if outgoing.text_bytes > SMALL_BYTES:
            is_free = client._lock.acquire(timeout=TIMEOUT_S)
            client._lock.release()
            seen.append((threading.current_thread(), is_free))
        return whole(outgoing)

    monkeypatch.setattr(OutgoingRequest, "message", watched)
    with fake_server_thread(socket_address, FakeService(), has_steps=True) as fake:
        with DrafterClient(socket_address, deadline_s=TIMEOUT_S) as client:
            client.start(1, array([7] * LONG))
            client.draft(progress_of({1: [8] * LONG}, limit=1))
            client.finish(1, array([9] * LONG))
            client.start(2, array([7] * 10 * LONG))
            client.draft(progress_of({2: []}, limit=1))
            thread = client._thread
        assert seen == [(thread, True)] * 3
        assert list(fake.service.learned.values()) == [[7] * LONG + [8] * LONG + [9] * LONG]


FORKING = """
import os, sys
from drafter_service.client import DrafterClient
from ssd.errors import UserError
from tests.replay import progress_of
from tests.strategies import array
client = DrafterClient(sys.argv[1], deadline_s=30)
assert client.transport == "socket"
client.start(1, array([5]))
client.draft(progress_of({1: []}, limit=1))
if (child := os.fork()) == 0:
    wrong = 0
    for call in (
        lambda: client.draft(progress_of({1: [9]}, limit=1)),
        lambda: client.start(2, array([5])),
        lambda: client.finish(1, array([5])),
    ):
        try:
            call()
            wrong += 1
        except UserError as error:
            wrong += f"belongs to process {os.getppid()}" not in str(error)
    client.close()
    os._exit(wrong)
assert os.waitpid(child, 0)[1] == 0
assert client.draft(progress_of({1: [6]}, limit=1)).tokens.tolist() == [1]
assert client.counters.reconnects == 0 and client.lost is None
client.close()
"""


def test_a_forked_child_does_not_use_its_parents_connection(socket_address):
    root = str(Path(__file__).parents[3])
    with fake_server_thread(socket_address, FakeService(lambda *_: [1]), has_steps=True) as fake:
        subprocess.run(
            [sys.executable, "-c", FORKING, socket_address],
            cwd=root,
            env={**os.environ, "PYTHONPATH": root},
            timeout=TIMEOUT_S,
            check=True,
        )
        assert sum(request.HasField("hello") for request in fake.service.requests) == 1
