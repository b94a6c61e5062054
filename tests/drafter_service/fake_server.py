"""A slow reference implementation of the service, over a real socket or without one.

It records requests, checks that clients follow the protocol, and can be made to fail.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field

import grpc
import numpy as np

from drafter_service.client import DrafterClient
from drafter_service.server.namespace import StreamHandle
from drafter_service.server.step_socket import StepSocket
from drafter_service.server.stream import draft_method
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.wire import drafts_message
from ssd.types import DraftBatch, Path
from tests.replay import progress_of

TIMEOUT_S = 30
"""Timeout of operations that take no time on an idle machine."""


def unpacked(data: bytes, dtype: str = "<u4") -> list[int]:
    return np.frombuffer(data, dtype).tolist()


@dataclass
class Known:
    """A sequence that the service has."""

    text: list[int]
    request_id: str
    session_id: str
    learn: bool
    last_request: int = 0
    """Number of the last request that named it."""
    drafted: list[int] = field(default_factory=list)


@dataclass
class FakeService:
    """The service without a connection; it serves one stream at a time."""

    guess: Callable[[list[int], int], list[int]] = lambda _text, _limit: []
    """Function that returns the draft path after a text, of at most the given number of tokens."""
    max_draft: int = 64
    may_learn: bool = True
    max_tokens: int = 0
    """Maximum number of running sequences; beyond it the least recently used are dropped. 0: no limit."""
    max_sequences: int = 0
    evicted: int = 0
    """Number of dropped sequences."""
    sequences: dict[int, Known] = field(default_factory=dict)
    """Sequences by wire id; they end with the stream."""
    learned: dict[str, list[int]] = field(default_factory=dict)
    """Texts by the names of their requests."""
    counters: pb.ClientCounters | None = None
    requests: list[pb.DraftRequest] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    """Number of tokens that the target verified."""

    def welcome(self, hello: pb.Hello) -> pb.Welcome:
        assert hello.protocol == 3
        self.sequences.clear()
        return pb.Welcome(
            protocol=3,
            namespace=hello.namespace or "default",
            may_learn=self.may_learn,
            max_draft=self.max_draft,
            max_tokens=self.max_tokens,
            max_sequences=self.max_sequences,
        )

    def answer(self, request: pb.DraftRequest) -> pb.DraftResponse:
        """Apply a request in the order that the protocol defines."""
        self.requests.append(request)
        response = pb.DraftResponse(step=request.step)
        if request.HasField("hello"):
            response.welcome.CopyFrom(self.welcome(request.hello))
        lost = []
        for start in request.starts:
            assert start.sequence_id not in self.sequences, "a running sequence was started again"
            text = unpacked(start.prompt) + unpacked(start.committed)
            assert not 0 < self.max_tokens < len(text), "the service ends the stream"
            known = Known(text, start.request_id, start.session_id, start.learn, len(self.requests))
            self.sequences[start.sequence_id] = known
            self._make_room()
        for finish in request.finishes:
            if (one := self.sequences.pop(finish.sequence_id, None)) is None:
                lost.append(finish.sequence_id)
                continue
            self._commit(one, unpacked(finish.tokens), finish.verified, finish.steps)
            if finish.learn and one.learn:
                self.learned.setdefault(one.request_id, one.text)
        if request.HasField("counters"):
            self.counters = request.counters
        drafts = DraftBatch.empty(0)
        if request.HasField("batch"):
            drafts = self._draft(request.batch, lost)
        self._make_room()
        response.drafts.CopyFrom(drafts_message(drafts))
        response.lost_ids = np.array(lost, "<u8").tobytes()
        return response

    def _make_room(self) -> None:
        known = self.sequences
        while (0 < self.max_tokens < sum(len(one.text) for one in known.values())) or (
            0 < self.max_sequences < len(known)
        ):
            del known[min(known, key=lambda wire_id: known[wire_id].last_request)]
            self.evicted += 1

    def texts(self) -> list[list[int]]:
        """Texts of all running sequences."""
        return [one.text for one in self.sequences.values()]

    def _draft(self, batch: pb.Batch, lost: list[int]) -> DraftBatch:
        ids, offsets, limits = unpacked(batch.sequence_ids, "<u8"), unpacked(batch.offsets), unpacked(batch.max_draft)
        tokens, verified = unpacked(batch.tokens), unpacked(batch.verified)
        steps = unpacked(batch.steps) or [1] * len(ids)
        assert len(ids) == len(set(ids)) == len(limits) == len(verified) == len(steps)
        paths = []
        for index, wire_id in enumerate(ids):
            one = self.sequences.get(wire_id)
            if one is None:
                lost.append(wire_id)
                paths.append([])
                continue
            one.last_request = len(self.requests)
            committed = tokens[offsets[index] : offsets[index + 1]]
            self._commit(one, committed, verified[index], steps[index])
            one.drafted = self.guess(one.text, min(limits[index], self.max_draft))
            paths.append(one.drafted)
        return batch_of(paths)

    def _commit(self, one: Known, tokens: list[int], verified: int, steps: int) -> None:
        assert verified <= len(one.drafted), "more was verified than was drafted"
        self.drafted += verified
        self.steps += max(1, steps) if tokens else 0
        one.text += tokens


def batch_of(paths: list[list[int]]) -> DraftBatch:
    return DraftBatch.from_paths([Path(np.array(path, np.uint32), np.full(len(path), 0.9)) for path in paths])


class FakeServer:
    """The service at a socket. Only its event loop may call the methods."""

    def __init__(self, address: str, service: FakeService, *, has_steps: bool) -> None:
        """Make a server; has_steps: whether streams use the step socket next to the address."""
        self.address = Address.parse(address)
        self.service = service
        self.has_steps = has_steps
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        """Status with which streams are ended."""
        self.distort: Callable[[pb.DraftResponse], pb.DraftResponse] = lambda response: response
        """Function that changes responses."""
        self.broken: list[AssertionError] = []
        """Violations of the protocol by clients."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._cut_code = grpc.StatusCode.UNAVAILABLE
        self._streams: set[FakeStream] = set()
        self._server: grpc.aio.Server | None = None
        self._steps = StepSocket(self, 100)

    async def start(self) -> None:
        self._server = grpc.aio.server()
        handlers = {"Draft": draft_method(self)}
        self._server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ssd.drafter.v1.DrafterService", handlers)]
        )
        self._server.add_insecure_port(self.address.text)
        await self._server.start()
        if self.has_steps:
            self._steps = StepSocket(self, 100)
            self._steps.bind(self.address.steps, 0o600)
            await self._steps.start()

    async def stop(self) -> None:
        if self.has_steps:
            stopping = asyncio.create_task(self._steps.stop(TIMEOUT_S))
            await asyncio.sleep(0)
            await self.cut()
            await stopping
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Break all streams."""
        self._cut_code = code
        while self._streams:
            for stream in self._streams:
                stream.end()
            await asyncio.sleep(0.001)

    async def pause(self) -> None:
        """Answer nothing until `resume`."""
        self.may_answer.clear()

    async def resume(self) -> None:
        self.may_answer.set()

    @asynccontextmanager
    async def open(self, context):
        """Serve a stream, see `drafter_service.server.stream.Streams`."""
        stream = FakeStream(self, context)
        self._streams.add(stream)
        try:
            yield stream
        except asyncio.CancelledError:
            if not stream.is_over:
                raise
            await context.abort(self._cut_code, "the stream was cut")
        finally:
            self._streams.discard(stream)


class FakeStream(StreamHandle):
    """One stream."""

    def __init__(self, server: FakeServer, context: object) -> None:
        super().__init__(asyncio.current_task())
        self._server, self._context = server, context

    async def answer(self, data: bytes) -> bytes:
        server = self._server
        if server.refusal is not None:
            await self._context.abort(*server.refusal)
        await server.may_answer.wait()
        try:
            response = server.service.answer(pb.DraftRequest.FromString(data))
        except AssertionError as broken:
            server.broken.append(broken)
            await self._context.abort(grpc.StatusCode.INTERNAL, "the client has violated the protocol")
        return server.distort(response).SerializeToString()

    def sent(self) -> None:
        if self.is_over:
            self.task.cancel()


class FakeServerThread:
    """A server in a separate event loop."""

    def __init__(self, address: str, service: FakeService, *, has_steps: bool = False) -> None:
        self.service = service
        self._has_steps = has_steps
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.server = self._wait_for(self._make(address))
        self.start()

    async def _make(self, address: str) -> FakeServer:
        return FakeServer(address, self.service, has_steps=self._has_steps)

    def start(self) -> None:
        self._wait_for(self.server.start())

    def stop(self) -> None:
        self._wait_for(self.server.stop())

    def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._wait_for(self.server.cut(code))

    def pause(self) -> None:
        self._wait_for(self.server.pause())

    def resume(self) -> None:
        self._wait_for(self.server.resume())

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        with suppress(RuntimeError):
            self._loop.close()
        assert not self.server.broken

    def _wait_for(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(TIMEOUT_S)


@contextmanager
def fake_server_thread(address: str, service: FakeService, *, has_steps: bool = False):
    """Yield a server that runs in a thread."""
    server = FakeServerThread(address, service, has_steps=has_steps)
    try:
        yield server
    finally:
        server.end()


def draft_of(client: DrafterClient, committed: Sequence[int], limit: int = 1, **outcome: int) -> list[int]:
    """Commit tokens of sequence 1, and return its draft."""
    return client.draft(progress_of({1: committed}, limit, **outcome)).tokens.tolist()
