"""The client's stream over the step socket: the threads that write requests, and the end of a stream."""

import errno
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client.streams import SLICE_BYTES, SocketStream
from drafter_service.transport.address import Address
from drafter_service.transport.wire import MAGIC, Frames, framed
from tests.drafter_service.fake_server import TIMEOUT_S, FakeService, fake_server_thread
from tests.strategies import examples


class Pipe:
    """A `SocketStream` whose other end a test reads."""

    def __init__(self):
        near, self.far = socket.socketpair()
        self.far.settimeout(TIMEOUT_S)
        self.stream = SocketStream(near, "token")
        self.pumping = threading.Thread(target=self.stream.pump, args=[lambda: None], daemon=True)
        self.frames = Frames()
        self.arrived = []

    def send(self, request):
        """Send a request, which must not wait for the other end."""
        began = time.monotonic()
        self.stream.send(request)
        assert time.monotonic() - began < TIMEOUT_S / 2

    def read(self, count):
        """Return the first requests that arrive, at least `count` of them."""
        while len(self.arrived) < count + 1:
            data = self.far.recv(1 << 20)
            if not data:
                raise EOFError
            self.arrived += [body for body, _ in self.frames.feed(data.removeprefix(MAGIC))]
        assert self.arrived[0] == b"token"
        return self.arrived[1:]

    def close(self):
        self.far.close()
        self.stream.cancel()
        if self.pumping.is_alive():
            self.pumping.join(TIMEOUT_S)
        self.stream.close()


@pytest.fixture
def pipe():
    pipe = Pipe()
    yield pipe
    pipe.close()


def test_the_authorization_precedes_the_first_request(pipe):
    assert pipe.far.recv(1 << 20) == MAGIC + framed(b"token")


def test_a_small_request_is_written_without_the_other_thread(pipe):
    pipe.send(b"1")
    assert pipe.read(1) == [b"1"]


@examples(30)
@given(st.lists(st.sampled_from([0, 1, 400, SLICE_BYTES, 3 * SLICE_BYTES, 1_500_000]), max_size=12), st.integers(0, 12))
def test_requests_keep_their_order_and_precede_the_end(sizes, read_after):
    """The other end reads only after some requests, so that the connection accepts no more."""
    pipe = Pipe()
    pipe.pumping.start()
    requests = [bytes([number]) * size for number, size in enumerate(sizes)]
    for number, request in enumerate(requests):
        pipe.send(request)
        if number == read_after:
            pipe.read(number + 1)
    pipe.stream.end()
    assert pipe.read(len(requests)) == requests
    with pytest.raises(EOFError):
        pipe.read(len(requests) + 1)
    pipe.close()


def test_a_broken_connection_accepts_requests_and_ends_the_pump(pipe):
    pipe.far.close()
    pipe.send(b"1")
    pipe.send(b"2" * (4 * SLICE_BYTES))
    pipe.pumping.start()
    pipe.pumping.join(TIMEOUT_S)
    assert not pipe.pumping.is_alive()
    pipe.stream.receive()
    assert "the connection broke" in pipe.stream.failure.details()
    pipe.send(b"3")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (struct.pack("<I", 4 | 1 << 31) + b"\xff" * 4, "a frame does not hold an Error"),
        (struct.pack("<I", 0x7FFF_FFFF), "a frame has 2147483647 bytes; the maximum is 67108864"),
    ],
)
def test_bytes_that_are_no_valid_frames_end_the_stream(pipe, data, reason):
    pipe.far.send(data)
    pipe.pumping.start()
    assert pipe.stream.receive() == []
    pipe.pumping.join(TIMEOUT_S)
    assert str(pipe.stream.failure) == reason


@pytest.mark.parametrize("poll_s", [0.0, 0.001, TIMEOUT_S])
def test_a_response_ends_the_wait(poll_s):
    near, far = socket.socketpair()
    stream = SocketStream(near, "", poll_s)
    for delay_s in (0.0, 0.01):
        sending = threading.Timer(delay_s, far.send, [framed(b"response")])
        sending.start()
        assert stream.wait(TIMEOUT_S)
        assert stream.receive() == [b"response"]
        sending.join()
    stream.close()
    far.close()


@pytest.mark.parametrize("poll_s", [0.0, 0.001, TIMEOUT_S])
def test_closing_a_stream_ends_the_waits(poll_s):
    near, far = socket.socketpair()
    stream = SocketStream(near, "", poll_s)
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

    monkeypatch.setattr("drafter_service.client.streams.socket.socketpair", refuse)
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


FORKING = """
import os, sys
import numpy as np
from drafter_service.client import DrafterClient
from ssd.errors import UserError
from ssd.types import Progress
def tokens(*ids):
    return np.array(ids, np.uint32)
def draft(*committed):
    return client.draft(Progress.of_one(1, tokens(*committed), max_draft=1)).tokens.tolist()
client = DrafterClient(sys.argv[1], deadline_s=30)
assert client.transport == "socket"
client.start(1, tokens(5))
draft()
if (child := os.fork()) == 0:
    wrong = 0
    for call in (lambda: draft(9), lambda: client.start(2, tokens(5)), lambda: client.finish(1, tokens(5))):
        try:
            call()
            wrong += 1
        except UserError as error:
            wrong += f"belongs to process {os.getppid()}" not in str(error)
    client.close()
    os._exit(wrong)
assert os.waitpid(child, 0)[1] == 0
assert draft(6) == [1]
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
