"""Calls to a service with protocol messages, without the client."""

from __future__ import annotations

import select
import socket
from contextlib import contextmanager

import grpc
import numpy as np

from drafter_service.commands.conformance.simulated_engine import RawStream, SocketCall, finish, grpc_call, start
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import MESSAGE_SIZES, batch_message, pack, read_drafts, unpack
from tests.replay import progress_of
from tests.waiting import TIMEOUT_S, eventually

__all__ = ["eventually", "finish", "start"]


def counted(first, size=40):
    """Return a unique text."""
    return list(range(first, first + size))


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


def status_of(call):
    """Return the status and details with which a call ends."""
    try:
        response = call()
    except grpc.RpcError as error:
        return error.code(), error.details()
    raise AssertionError(f"answered with {response}")


class Stream(RawStream):
    """One Draft stream, with calls that wait for a response and calls that do not."""

    def send(self, request=None, **fields):
        """Send a DraftRequest, or bytes."""
        is_raw = isinstance(request, bytes)
        super().send(request if is_raw else (request or pb.DraftRequest(**fields)).SerializeToString())

    def read(self):
        return next(self.call)

    def exchange(self, request=None, **fields):
        """Send a request and return its response."""
        self.send(request, **fields)
        return self.read()

    def draft(self, sequence_id, committed=(), limit=8, **fields):
        """Return the draft of one sequence."""
        return drafted(self.exchange(batch=batch({sequence_id: committed}, limit), **fields))

    def refusal(self, **fields):
        """Return the status and details with which the stream ends, after a DraftRequest with these fields, if any."""
        if fields:
            self.send(**fields)
        return status_of(self.read)

    def has_ended(self):
        """Whether the service has ended a stream that has no unread responses."""
        if isinstance(self.call, SocketCall):
            return any(select.select([self.call.socket], [], [], 0))
        return self.call.done()

    def end(self):
        """Send the end of the requests, and return once the service has ended the stream."""
        super().end()
        for _ in self.call:
            pass

    def cut(self):
        """Break the stream."""
        super().end()
        self.call.cancel()


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
        over_grpc = grpc_call(self.channel, self._metadata, wait_for_ready=True)
        stream = Stream(over_grpc if self._steps is None else self._open_socket)
        self._streams.append(stream)
        if namespace is not None:
            stream.welcome = stream.exchange(hello=hello(namespace, **fields)).welcome
        return stream

    def _open_socket(self, requests):
        connection = socket.socket(socket.AF_UNIX)
        connection.connect(self._steps.removeprefix("unix:") + ".steps")
        return SocketCall(connection, dict(self._metadata).get("authorization", ""), requests)

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
        return status_of(lambda: self.call(method, **fields))

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
