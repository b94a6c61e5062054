"""Calls to a sidecar by its contract alone: messages as they are, without the client."""

from __future__ import annotations

import queue
import time
from contextlib import contextmanager

import grpc
import numpy as np

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.wire import MAX_MESSAGE_BYTES, batch_message, pack, read_drafts, unpack
from tests.replay import progress_of
from tests.strategies import array

DRAFT = "/ssd.drafter.v1.DrafterService/Draft"
TIMEOUT_S = 60
"""Generous: machines are shared."""
CLIENT = b"0123456789abcdef"


def eventually(condition, timeout_s=TIMEOUT_S):
    """What `condition` gives once it is true. The service works in the background; ask until it has."""
    until = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < until, "it never came true"
        time.sleep(0.002)
    return value


def start(sequence_id, tokens, **fields):
    return pb.Start(sequence_id=sequence_id, prompt=pack(array(list(tokens)), "u4"), **fields)


def finish(sequence_id, tokens=(), learn=True, **fields):
    return pb.Finish(sequence_id=sequence_id, tokens=pack(array(list(tokens)), "u4"), learn=learn, **fields)


def batch(committed, limit=8, **fields):
    """`committed`: tokens by sequence id."""
    return batch_message(progress_of(committed, limit, **fields))


def hello(namespace="", client_id=b"", **model):
    return pb.Hello(protocol=2, oldest_protocol=1, client_id=client_id, model=pb.Model(**model), namespace=namespace)


def texts(*runs, names=()):
    """Texts of tokens, with their names or without."""
    offsets = np.cumsum([0, *map(len, runs)]).astype(np.uint32)
    flat = np.concatenate([*map(np.asarray, runs), np.empty(0)]).astype(np.uint32)
    return pb.Texts(tokens=pack(flat, "u4"), offsets=pack(offsets, "u4"), requests=names)


def drafted(response, sequences=1, index=0):
    """The tokens of a sequence's draft."""
    assert not response.HasField("error"), response.error.message
    return read_drafts(response.drafts, sequences).tokens_of(index).tolist()


def lost(response):
    assert not response.HasField("error"), response.error.message
    return unpack(response.lost_ids, "u8", "lost_ids").tolist()


class Stream:
    """One Draft stream, a request at a time or without waiting."""

    def __init__(self, channel, metadata=(), *, wait_for_ready=True):
        self._requests = queue.SimpleQueue()
        method = channel.stream_stream(DRAFT, response_deserializer=pb.DraftResponse.FromString)
        requests = iter(self._requests.get, None)
        self.call = method(requests, metadata=metadata, timeout=TIMEOUT_S, wait_for_ready=wait_for_ready)

    def send(self, request=None, **fields):
        """A DraftRequest, or bytes."""
        self._requests.put(
            request if isinstance(request, bytes) else (request or pb.DraftRequest(**fields)).SerializeToString()
        )

    def read(self):
        return next(self.call)

    def ask(self, request=None, **fields):
        """The response to one request."""
        self.send(request, **fields)
        return self.read()

    def draft(self, sequence_id, committed=(), limit=8, **fields):
        """The draft of one sequence."""
        return drafted(self.ask(batch=batch({sequence_id: committed}, limit), **fields))

    def refusal(self):
        """The status and details that the stream ends with."""
        try:
            response = self.read()
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"answered with {response}")

    def end(self):
        """No more requests; returns once the service has ended the stream."""
        self._requests.put(None)
        for _ in self.call:
            pass

    def cut(self):
        """Break it."""
        self.call.cancel()
        self._requests.put(None)


class Caller:
    """A channel to a service, its streams and calls."""

    def __init__(self, channel, metadata=()):
        self.channel = channel
        self._metadata = metadata
        self._stub = DrafterServiceStub(channel)
        self._streams = []

    def stream(self, namespace=None, **fields):
        """A stream; greeted if a namespace is given."""
        stream = Stream(self.channel, self._metadata)
        self._streams.append(stream)
        if namespace is not None:
            stream.welcome = stream.ask(hello=hello(namespace, **fields)).welcome
        return stream

    def call(self, method, **fields):
        """The response to a unary call."""
        request = getattr(pb, f"{method}Request")(**fields)
        return getattr(self._stub, method)(request, metadata=self._metadata, timeout=TIMEOUT_S, wait_for_ready=True)

    def begin(self, method, **fields):
        """A unary call that is not waited for."""
        request = getattr(pb, f"{method}Request")(**fields)
        return getattr(self._stub, method).future(request, metadata=self._metadata, timeout=TIMEOUT_S)

    def refusal(self, method, **fields):
        """The status and details that a unary call ends with."""
        try:
            response = self.call(method, **fields)
        except grpc.RpcError as error:
            return error.code(), error.details()
        raise AssertionError(f"answered with {response}")

    def warm(self, requests):
        """The stub's Warm, over an iterable of requests."""
        return self._stub.Warm(iter(requests), metadata=self._metadata, timeout=TIMEOUT_S, wait_for_ready=True)

    def observe(self, namespace, *runs, names=(), **fields):
        return self.call("Observe", namespace=namespace, texts=texts(*runs, names=names), **fields)

    def probe(self, namespace, context, limit=8):
        """What is drafted after a context in a namespace now, by a stream of its own."""
        stream = self.stream(namespace)
        response = stream.ask(starts=[start(1, context, is_private=True)], batch=batch({1: ()}, limit))
        stream.end()
        return drafted(response)

    def close(self):
        for stream in self._streams:
            stream.cut()
        self.channel.close()


@contextmanager
def connected(address, metadata=(), credentials=None):
    """A caller over a connection of its own."""
    options = [(f"grpc.max_{way}_message_length", MAX_MESSAGE_BYTES) for way in ("send", "receive")]
    options.append(("grpc.use_local_subchannel_pool", 1))
    if credentials is None:
        channel = grpc.insecure_channel(address, options=options)
    else:
        channel = grpc.secure_channel(address, credentials, options=options)
    caller = Caller(channel, metadata)
    try:
        yield caller
    finally:
        caller.close()
