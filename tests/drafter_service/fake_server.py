"""A service that knows the contract and nothing else, slow and obvious, over a real socket or without one.

It notes what it was told, checks that the client keeps to the contract, and misbehaves as a test asks for.
"""

from __future__ import annotations

import asyncio
import struct
import threading
from collections.abc import Callable, Coroutine
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path as FilePath

import grpc
import numpy as np

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import drafts_message
from ssd.types import DraftBatch, Path

TIMEOUT_S = 30
"""For what happens at once on a machine that is not busy."""


def unpacked(data: bytes, dtype: str = "<u4") -> list[int]:
    return np.frombuffer(data, dtype).tolist()


@dataclass
class Known:
    """A sequence as the service knows it."""

    text: list[int]
    request: str
    session: str
    is_private: bool
    heard: int = 0
    """With which request it was last heard of."""
    drafted: list[int] = field(default_factory=list)


@dataclass
class FakeService:
    """What a service knows and says, without a connection."""

    guess: Callable[[list[int], int], list[int]] = lambda _text, _limit: []
    """The path of at most so many tokens that it drafts after a text."""
    most_draft: int = 64
    most_tokens: int = 0
    """Of a client's running sequences; beyond it those go that were silent for longest. 0: any number."""
    most_sequences: int = 0
    evicted: int = 0
    """Sequences that went."""
    sequences: dict[bytes, dict[int, Known]] = field(default_factory=dict)
    """By client and wire id."""
    learned: dict[str, list[int]] = field(default_factory=dict)
    """Texts by the names of their requests."""
    counters: pb.ClientCounters | None = None
    requests: list[pb.DraftRequest] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    """Tokens that the target verified."""
    accepted: int = 0

    def greet(self, hello: pb.Hello) -> pb.Welcome:
        assert (hello.protocol, hello.oldest_protocol, len(hello.client_id)) == (2, 2, 16)
        known = self.sequences.setdefault(hello.client_id, {})
        return pb.Welcome(
            protocol=2,
            max_draft=self.most_draft,
            learns=True,
            most_tokens=self.most_tokens,
            most_sequences=self.most_sequences,
            resumed_ids=np.array(list(known), "<u8").tobytes(),
            resumed_lengths=np.array([len(one.text) for one in known.values()], "<u4").tobytes(),
        )

    def answer(self, client_id: bytes, request: pb.DraftRequest) -> pb.DraftResponse:
        """Apply a request in the order that the contract says."""
        self.requests.append(request)
        response = pb.DraftResponse(step=request.step)
        if request.HasField("hello"):
            assert request.hello.client_id == client_id
            response.welcome.CopyFrom(self.greet(request.hello))
        known = self.sequences[client_id]
        lost = []
        for start in request.starts:
            assert start.sequence_id not in known, "a running sequence was started again"
            text = unpacked(start.prompt) + unpacked(start.committed)
            assert not 0 < self.most_tokens < len(text), "the service ends the stream"
            known[start.sequence_id] = Known(text, start.request, start.session, start.is_private, len(self.requests))
            self._make_room(known)
        for finish in request.finishes:
            if (one := known.pop(finish.sequence_id, None)) is None:
                lost.append(finish.sequence_id)
                continue
            self._commit(one, unpacked(finish.tokens), finish.verified, finish.accepted, finish.steps)
            if finish.learn and not one.is_private:
                self.learned.setdefault(one.request, one.text)
        if request.HasField("counters"):
            self.counters = request.counters
        drafts = self._draft(known, request.batch, lost) if request.HasField("batch") else DraftBatch.empty(0)
        self._make_room(known)
        response.drafts.CopyFrom(drafts_message(drafts))
        response.lost_ids = np.array(lost, "<u8").tobytes()
        return response

    def _make_room(self, known: dict[int, Known]) -> None:
        while (0 < self.most_tokens < sum(len(one.text) for one in known.values())) or (
            0 < self.most_sequences < len(known)
        ):
            del known[min(known, key=lambda wire_id: known[wire_id].heard)]
            self.evicted += 1

    def lose(self, wire_id: int) -> None:
        """Forget a sequence of whichever client."""
        for known in self.sequences.values():
            known.pop(wire_id, None)

    def texts(self) -> list[list[int]]:
        """Of all that runs, of all clients."""
        return [one.text for known in self.sequences.values() for one in known.values()]

    def _draft(self, known: dict[int, Known], batch: pb.Batch, lost: list[int]) -> DraftBatch:
        ids, offsets, limits = unpacked(batch.sequence_ids, "<u8"), unpacked(batch.offsets), unpacked(batch.max_draft)
        tokens, verified, accepted = unpacked(batch.tokens), unpacked(batch.verified), unpacked(batch.accepted)
        steps = unpacked(batch.steps) or [1] * len(ids)
        assert len(ids) == len(set(ids)) == len(limits) == len(verified) == len(accepted) == len(steps)
        paths = []
        for index, wire_id in enumerate(ids):
            one = known.get(wire_id)
            if one is None:
                lost.append(wire_id)
                paths.append([])
                continue
            one.heard = len(self.requests)
            committed = tokens[offsets[index] : offsets[index + 1]]
            self._commit(one, committed, verified[index], accepted[index], steps[index])
            one.drafted = self.guess(one.text, min(limits[index], self.most_draft))
            paths.append(one.drafted)
        return DraftBatch.from_paths([Path(np.array(path, np.uint32), np.full(len(path), 0.9)) for path in paths])

    def _commit(self, one: Known, tokens: list[int], verified: int, accepted: int, steps: int) -> None:
        assert accepted <= verified <= len(one.drafted), "more was verified than was drafted"
        on_path = 0
        while on_path < min(verified, len(tokens)) and one.drafted[on_path] == tokens[on_path]:
            on_path += 1
        confirmed = on_path - accepted  # by the target itself, between two pieces
        assert 0 <= confirmed < max(1, steps), "counts that cannot be"
        self.drafted += verified - confirmed
        self.accepted += accepted
        self.steps += max(1, steps) if tokens else 0
        one.text += tokens


class FakeServer:
    """The service behind a socket. All its methods belong to its event loop."""

    def __init__(self, address: str, service: FakeService, *, has_steps: bool) -> None:
        """`has_steps`: whether streams go over the step socket beside the address."""
        self.address = address
        self.service = service
        self.has_steps = has_steps
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        """What streams are ended with."""
        self.distort: Callable[[pb.DraftResponse], pb.DraftResponse] = lambda response: response
        """What becomes of responses."""
        self.is_forgetful = False
        """Whether a broken stream's sequences are lost at once."""
        self.broken: list[AssertionError] = []
        """Where clients broke the contract."""
        self._may_answer = asyncio.Event()
        self._may_answer.set()
        self._cut = asyncio.Event()
        self._cut_code = grpc.StatusCode.UNAVAILABLE
        self._streams = 0
        self._server: grpc.aio.Server | None = None
        self._steps: asyncio.Server | None = None

    async def start(self) -> None:
        server = grpc.aio.server()
        handler = grpc.stream_stream_rpc_method_handler(
            self._draft, pb.DraftRequest.FromString, pb.DraftResponse.SerializeToString
        )
        server.add_generic_rpc_handlers(
            [grpc.method_handlers_generic_handler("ssd.drafter.v1.DrafterService", {"Draft": handler})]
        )
        server.add_insecure_port(self.address)
        await server.start()
        self._server = server
        if self.has_steps:
            self._steps = await asyncio.start_unix_server(
                self._serve_steps, self.address.removeprefix("unix:") + ".steps"
            )

    async def stop(self) -> None:
        if self._steps is not None:
            self._steps.close()
            FilePath(self.address.removeprefix("unix:") + ".steps").unlink()
            await self._break_off()
            self._steps = None
        if self._server is not None:
            await self._server.stop(None)
            self._server = None

    async def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Break all streams."""
        self._cut_code = code
        await self._break_off()

    async def _break_off(self) -> None:
        self._cut.set()
        while self._streams:
            await asyncio.sleep(0.001)
        self._cut.clear()

    async def pause(self) -> None:
        """Hear nothing and say nothing."""
        self._may_answer.clear()

    async def resume(self) -> None:
        self._may_answer.set()

    async def _serve_steps(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        context = FrameContext(reader, writer)
        assert await reader.readexactly(15) == b"ssd.drafter.v1\n"
        assert await context.read_bytes() == b""
        with suppress(AbortedError):
            await self._draft(None, context)
            context.end(grpc.StatusCode.OK, "")
        writer.close()

    async def _draft(self, requests: object, context: grpc.aio.ServicerContext | FrameContext) -> None:
        client_id = b""
        self._streams += 1
        try:
            while (request := await self._unless_cut(context, context.read())) is not grpc.aio.EOF:
                if self.refusal is not None:
                    await context.abort(*self.refusal)
                await self._unless_cut(context, self._may_answer.wait())
                client_id = client_id or request.hello.client_id
                await context.write(self.distort(self.service.answer(client_id, request)))
        except AssertionError as broken:
            self.broken.append(broken)
        finally:
            self._streams -= 1
            if self.is_forgetful:
                self.service.sequences.pop(client_id, None)

    async def _unless_cut(self, context: grpc.aio.ServicerContext | FrameContext, coming: Coroutine) -> object:
        waiting = [asyncio.create_task(coming), asyncio.create_task(self._cut.wait())]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        for task in waiting:
            task.cancel()
        if self._cut.is_set():
            await context.abort(self._cut_code, "the stream was cut")
        return waiting[0].result()


class AbortedError(Exception):
    """A stream was ended."""


class FrameContext:
    """A connection of the step socket, with the methods of gRPC's context that are of use here."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    async def read_bytes(self) -> bytes:
        (size,) = struct.unpack("<I", await self._reader.readexactly(4))
        return await self._reader.readexactly(size)

    async def read(self) -> object:
        try:
            return pb.DraftRequest.FromString(await self.read_bytes())
        except (asyncio.IncompleteReadError, ConnectionResetError):
            return grpc.aio.EOF

    async def write(self, response: pb.DraftResponse) -> None:
        data = response.SerializeToString()
        self._writer.write(struct.pack("<I", len(data)) + data)

    async def abort(self, code: grpc.StatusCode, details: str) -> None:
        self.end(code, details)
        raise AbortedError

    def end(self, code: grpc.StatusCode, details: str) -> None:
        data = pb.Error(code=code.value[0], message=details).SerializeToString()
        self._writer.write(struct.pack("<I", len(data) | 1 << 31) + data)


@asynccontextmanager
async def fake_server(address: str, service: FakeService, *, has_steps: bool = False):
    """A server in the event loop of the test."""
    server = FakeServer(address, service, has_steps=has_steps)
    await server.start()
    try:
        yield server
    finally:
        await server.stop()
    assert not server.broken


class FakeServerThread:
    """A server in an event loop of its own."""

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
    """A server in a thread."""
    server = FakeServerThread(address, service, has_steps=has_steps)
    try:
        yield server
    finally:
        server.end()
