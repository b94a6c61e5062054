"""The simulated service of `ssd-drafter conformance` as a service that tests plan, over a real socket or without one.

It records requests, fails if a client breaks a rule of the protocol, and can be made to fail itself.
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
from drafter_service.commands.conformance.engine_side import EngineChecker
from drafter_service.commands.conformance.simulated_service import SimulatedServer
from drafter_service.server.namespace import StreamHandle
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
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
    learn: bool
    last_request: int
    """Number of the last request that named it."""
    drafted: list[int] = field(default_factory=list)


class FakeService(EngineChecker):
    """The service without a connection; it serves one stream at a time."""

    def __init__(
        self,
        guess: Callable[[list[int], int], list[int]] = lambda _text, _limit: [],
        *,
        max_draft: int = 64,
        may_learn: bool = True,
        held: pb.Held | None = None,
        max_tokens: int = 0,
        max_sequences: int = 0,
        vocab_size: int = 0,
    ) -> None:
        """guess: returns the draft path after a text, of at most the given number of tokens. max_tokens, max_sequences:
        limits of running sequences, beyond which the least recently used are dropped; 0: no limit. vocab_size: that of
        the namespace; token ids of this or more break the protocol.
        """
        super().__init__()
        self.guess, self.max_draft, self.may_learn, self.held = guess, max_draft, may_learn, held
        self.max_tokens, self.max_sequences, self.vocab_size = max_tokens, max_sequences, vocab_size
        self.evicted = 0
        """Number of dropped sequences."""
        self.sequences: dict[int, Known] = {}
        """Sequences by wire id; they end with the stream."""
        self.learned: dict[str, list[int]] = {}
        """Texts by the names of their requests."""
        self.counters: pb.ClientCounters | None = None
        self.requests: list[pb.DraftRequest] = []
        self.steps = 0
        self.drafted = 0
        """Number of tokens that the target verified."""
        self._stream = self.opened()

    @property
    def broken(self) -> dict[str, str]:
        """Rules that the client has broken. Tests commit tokens and report durations that no engine has."""
        return {name: failure for name, failure in self.checks.failures.items() if failure and name != "step times"}

    def answer(self, request: pb.DraftRequest) -> pb.DraftResponse:
        """Apply a request of the only stream, which begins with its hello."""
        self.requests.append(request)
        if request.HasField("hello"):
            self.sequences.clear()
            self._stream = self.opened()
        if request.HasField("counters"):
            self.counters = request.counters
        response = self.reply(self._stream, request.SerializeToString())
        self._make_room()
        assert response is not None
        assert not self.broken, self.broken
        return response

    def texts(self) -> list[list[int]]:
        """Texts of all running sequences."""
        return [one.text for one in self.sequences.values()]

    def welcome(self, hello):
        self._stream.vocab_size = self.vocab_size
        return pb.Welcome(
            protocol=3,
            namespace=hello.namespace or "default",
            may_learn=self.may_learn,
            max_draft=self.max_draft,
            max_tokens=self.max_tokens,
            max_sequences=self.max_sequences,
            held=self.held,
            vocab_size=self.vocab_size,
        )

    def start(self, stream, start):
        one = start.message
        running = f"sequence {one.sequence_id} was started again"
        self.checks.expect("starts", one.sequence_id not in self.sequences, running)
        text = [*start.texts["prompt"].tolist(), *start.texts["committed"].tolist()]
        self.checks.expect("starts", not 0 < self.max_tokens < len(text), "the service ends the stream")
        self.sequences[one.sequence_id] = Known(text, one.request_id, one.learn, len(self.requests))
        self._make_room()

    def finish(self, stream, finish, tokens):
        if (one := self.sequences.pop(finish.sequence_id, None)) is None:
            return False
        self._commit(one, tokens.tolist(), finish.verified, finish.steps)
        if finish.learn and one.learn:
            self.learned.setdefault(one.request_id, one.text)
        return True

    def draft(self, stream, row):
        if (one := self.sequences.get(row.sequence_id)) is None:
            return None
        one.last_request = len(self.requests)
        self._commit(one, row.tokens, row.verified, row.steps)
        one.drafted = self.guess(one.text, min(row.limit, self.max_draft))
        return one.drafted

    def _make_room(self) -> None:
        known = self.sequences
        while (0 < self.max_tokens < sum(len(one.text) for one in known.values())) or (
            0 < self.max_sequences < len(known)
        ):
            del known[min(known, key=lambda wire_id: known[wire_id].last_request)]
            self.evicted += 1

    def _commit(self, one: Known, tokens: list[int], verified: int, steps: int) -> None:
        self.checks.expect("counts", verified <= len(one.drafted), "more was verified than was drafted")
        self.drafted += verified
        self.steps += max(1, steps) if tokens else 0
        one.text += tokens


class FakeServer:
    """The service at a socket, which a thread serves."""

    def __init__(self, address: str, service: FakeService, *, has_steps: bool = False) -> None:
        """Start the server; has_steps: whether streams use the step socket next to the address."""
        self.service, self.has_steps = service, has_steps
        self.refusal: tuple[grpc.StatusCode, str] | None = None
        """Status with which streams are ended."""
        self.distort: Callable[[pb.DraftResponse], pb.DraftResponse] = lambda response: response
        """Function that changes responses."""
        self.may_answer = asyncio.Event()
        self.may_answer.set()
        self._server = SimulatedServer(self, Address.parse(address), has_steps=has_steps)
        self._cut_code = grpc.StatusCode.UNAVAILABLE
        self._streams: set[FakeStream] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._thread.start()
        self.start()

    def start(self) -> None:
        self._do(self._server.start())

    def stop(self) -> None:
        self._do(self._stop())

    def cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        """Break all streams."""
        self._do(self._cut(code))

    def pause(self) -> None:
        """Answer nothing until `resume`."""
        self._do(self._call(self.may_answer.clear))

    def resume(self) -> None:
        self._do(self._call(self.may_answer.set))

    def end(self) -> None:
        self.stop()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(TIMEOUT_S)
        with suppress(RuntimeError):
            self._loop.close()
        assert not self.service.broken

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

    async def _call(self, function: Callable[[], None]) -> None:
        function()

    async def _stop(self) -> None:
        stopping = asyncio.create_task(self._server.stop())
        await asyncio.sleep(0)
        await self._cut()
        await stopping

    async def _cut(self, code: grpc.StatusCode = grpc.StatusCode.UNAVAILABLE) -> None:
        self._cut_code = code
        while self._streams:
            for stream in self._streams:
                stream.end()
            await asyncio.sleep(0.001)

    def _do(self, work):
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(TIMEOUT_S)


class FakeStream(StreamHandle):
    """One stream."""

    def __init__(self, server: FakeServer, context: object) -> None:
        super().__init__()
        self._server, self._context = server, context

    async def answer(self, data: bytes) -> bytes:
        server = self._server
        if server.refusal is not None:
            await self._context.abort(*server.refusal)
        await server.may_answer.wait()
        try:
            response = server.service.answer(pb.DraftRequest.FromString(data))
        except AssertionError as broken:
            await self._context.abort(grpc.StatusCode.INTERNAL, str(broken))
        return server.distort(response).SerializeToString()

    def sent(self) -> None:
        if self.is_over:
            self.task.cancel()


@contextmanager
def fake_server_thread(address: str, service: FakeService, *, has_steps: bool = False):
    """Yield a server that runs in a thread."""
    server = FakeServer(address, service, has_steps=has_steps)
    try:
        yield server
    finally:
        server.end()


def draft_of(client: DrafterClient, committed: Sequence[int], limit: int = 1, **outcome: int) -> list[int]:
    """Commit tokens of sequence 1, and return its draft."""
    return client.draft(progress_of({1: committed}, limit, **outcome)).tokens.tolist()
