"""Calls to a service with protocol messages, without the client."""

from __future__ import annotations

import itertools
import queue
import select
import socket
import struct
import threading
import time
from concurrent.futures import Future
from contextlib import contextmanager, suppress

import grpc
import numpy as np

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES, batch_message, pack, read_drafts, unpack
from tests.replay import progress_of
from tests.strategies import array

DRAFT = "/ssd.drafter.v1.DrafterService/Draft"
TIMEOUT_S = 60
"""Timeout of operations, long enough for busy machines."""


def eventually(condition, timeout_s=TIMEOUT_S):
    """Wait until `condition` returns a true value, since the service works in the background; return the value."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, "the condition did not become true"
        time.sleep(0.002)
    return value


def counted(first, size=40):
    """Return a unique text."""
    return list(range(first, first + size))


def start(sequence_id, tokens, learn=True, **fields):
    return pb.Start(sequence_id=sequence_id, prompt=pack(array(list(tokens)), "u4"), learn=learn, **fields)


def finish(sequence_id, tokens=(), learn=True, **fields):
    return pb.Finish(sequence_id=sequence_id, tokens=pack(array(list(tokens)), "u4"), learn=learn, **fields)


def batch(committed, limit=8, **fields):
    """Return a Batch message; committed: tokens by sequence id."""
    return batch_message(progress_of(committed, limit, **fields))


def hello(namespace="", **model):
    return pb.Hello(protocol=3, model=pb.Model(**model), namespace=namespace)


def texts(*runs, names=()):
    """Return a Texts message of these tokens, with or without names."""
    offsets = np.cumsum([0, *map(len, runs)]).astype(np.uint32)
    flat = np.concatenate([*map(np.asarray, runs), np.empty(0)]).astype(np.uint32)
    return pb.Texts(tokens=pack(flat, "u4"), offsets=pack(offsets, "u4"), request_ids=names)


def drafts_in(message, sequences):
    """Return the drafts of a message, of which none is malformed."""
    drafts, malformed = read_drafts(message, np.full(sequences, 1 << 16, np.uint32))
    assert not malformed
    return drafts


def drafted(response, sequences=1, index=0):
    """Return the tokens of a sequence's draft."""
    assert not response.HasField("error"), response.error.message
    return drafts_in(response.drafts, sequences).tokens_of(index).tolist()


def lost(response):
    assert not response.HasField("error"), response.error.message
    return unpack(response.lost_ids, "u8", "lost_ids").tolist()


class SocketEnd(grpc.RpcError):
    """The status of a stream over the step socket."""

    def __init__(self, code, details):
        self.code, self.details = lambda: code, lambda: details


class SocketCall:
    """A Draft stream over the step socket, with the methods of gRPC's calls that tests use."""

    def __init__(self, address, requests, authorization=""):
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.settimeout(TIMEOUT_S)
        self._socket.connect(address.removeprefix("unix:") + ".steps")
        self._end = Future()
        threading.Thread(target=self._send, args=(authorization, requests), daemon=True).start()

    def __iter__(self):
        return self

    def __next__(self):
        length = struct.unpack("<I", self._exactly(4))[0]
        body = self._exactly(length & 0x7FFF_FFFF)
        if length < 1 << 31:
            return pb.DraftResponse.FromString(body)
        error = pb.Error.FromString(body)
        code = next(code for code in grpc.StatusCode if code.value[0] == error.code)
        self._end.set_result((code, error.message))
        self._socket.close()
        if code is grpc.StatusCode.OK:
            raise StopIteration
        raise SocketEnd(code, error.message)

    def done(self):
        """Whether the next frame is the last."""
        if not self._end.done() and select.select([self._socket], [], [], 0)[0]:
            header = self._socket.recv(4, socket.MSG_PEEK)
            if len(header) == 4 and header[3] & 128:
                with suppress(StopIteration, SocketEnd):
                    next(self)
        return self._end.done()

    def code(self):
        return self._end.result(TIMEOUT_S)[0]

    def details(self):
        return self._end.result(TIMEOUT_S)[1]

    def cancel(self):
        self._socket.close()

    def _send(self, authorization, requests):
        try:
            self._socket.sendall(b"ssd.drafter.v1\n")
            for data in itertools.chain([authorization.encode()], requests):
                self._socket.sendall(struct.pack("<I", len(data)) + data)
            self._socket.shutdown(socket.SHUT_WR)
        except OSError:
            pass  # The service has ended the stream.

    def _exactly(self, size):
        data = b""
        while len(data) < size:
            try:
                more = self._socket.recv(size - len(data))
            except ConnectionResetError:
                more = b""
            if not more:
                raise SocketEnd(grpc.StatusCode.UNAVAILABLE, "the connection broke")
            data += more
        return data


class Stream:
    """One Draft stream, with calls that wait for a response and calls that do not."""

    def __init__(self, open_call):
        """Open the stream; `open_call` makes a call from an iterator of requests."""
        self._requests = queue.SimpleQueue()
        self.call = open_call(iter(self._requests.get, None))

    def send(self, request=None, **fields):
        """Send a DraftRequest, or bytes."""
        self._requests.put(
            request if isinstance(request, bytes) else (request or pb.DraftRequest(**fields)).SerializeToString()
        )

    def read(self):
        return next(self.call)

    def exchange(self, request=None, **fields):
        """Send a request and return its response."""
        self.send(request, **fields)
        return self.read()

    def draft(self, sequence_id, committed=(), limit=8, **fields):
        """Return the draft of one sequence."""
        return drafted(self.exchange(batch=batch({sequence_id: committed}, limit), **fields))

    def refusal(self):
        """Return the status and details with which the stream ends."""
        try:
            response = self.read()
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"answered with {response}")

    def end(self):
        """Send the end of the requests, and return once the service has ended the stream."""
        self._requests.put(None)
        for _ in self.call:
            pass

    def cut(self):
        """Break the stream."""
        self.call.cancel()
        self._requests.put(None)


class Caller:
    """A channel to a service, its streams and calls."""

    def __init__(self, channel, metadata=(), steps=None):
        """Make a caller; steps: address of the service if streams use its step socket, None for gRPC."""
        self.channel = channel
        self._metadata = metadata
        self._steps = steps
        self._stub = DrafterServiceStub(channel)
        self._streams = []

    def stream(self, namespace=None, **fields):
        """Return a new stream, with its handshake if a namespace is given."""
        stream = Stream(self._open_stream)
        self._streams.append(stream)
        if namespace is not None:
            stream.welcome = stream.exchange(hello=hello(namespace, **fields)).welcome
        return stream

    def _open_stream(self, requests):
        if self._steps is not None:
            return SocketCall(self._steps, requests, dict(self._metadata).get("authorization", ""))
        method = self.channel.stream_stream(DRAFT, response_deserializer=pb.DraftResponse.FromString)
        return method(requests, metadata=self._metadata, timeout=TIMEOUT_S, wait_for_ready=True)

    def call(self, method, **fields):
        """Make a unary call and return its response."""
        request = getattr(pb, f"{method}Request")(**fields)
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=TIMEOUT_S, wait_for_ready=True)

    def begin(self, method, **fields):
        """Start a unary call without waiting for it."""
        request = getattr(pb, f"{method}Request")(**fields)
        return getattr(self._stub, method).future(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def refusal(self, method, **fields):
        """Return the status and details with which a unary call ends."""
        try:
            response = self.call(method, **fields)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"answered with {response}")

    def observe(self, namespace, *runs, names=(), **fields):
        return self.call("Observe", namespace=namespace, texts=texts(*runs, names=names), **fields)

    def probe(self, namespace, context, limit=8):
        """Return the current draft after a context in a namespace, from a separate stream."""
        stream = self.stream(namespace)
        response = stream.exchange(starts=[start(1, context, learn=False)], batch=batch({1: ()}, limit))
        stream.end()
        return drafted(response)

    def opened(self, namespace):
        """Return a stream, or None if it is refused."""
        try:
            return self.stream(namespace)
        except grpc.RpcError:
            return None

    def close(self):
        for stream in self._streams:
            stream.cut()
        self.channel.close()


@contextmanager
def connected(address, metadata=(), credentials=None, *, over_steps=False):
    """Yield a caller with a separate connection; over_steps: whether its streams use the step socket."""
    options = [*MESSAGE_SIZES, ("grpc.use_local_subchannel_pool", 1)]
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    caller = Caller(channel, metadata, address if over_steps else None)
    try:
        yield caller
    finally:
        caller.close()
