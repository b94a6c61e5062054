"""A client without a connection, and its messages to and from a service that is obvious."""

from collections import deque

from drafter_service.client.core import Core

from drafter_service.stubs import drafter_pb2 as pb
from ssd.types import DraftBatch
from tests.drafter_service.fake_server import FakeService
from tests.strategies import array


class Wire:
    """Between a core and a service: messages arrive when a test says so, or never."""

    def __init__(self, service: FakeService, model: pb.Model | None = None) -> None:
        self.now = 0.0
        ids = iter(range(1, 1000))
        self.core = Core(
            pb.Hello(model=model),
            clock=lambda: self.now,
            random_bytes=lambda size: next(ids).to_bytes(size, "big"),
        )
        self.service = service
        self.client_id = b""
        self.upward: deque[pb.DraftRequest] = deque()
        self.downward: deque[pb.DraftResponse] = deque()

    def connect(self) -> None:
        self.core.greet()
        self.flush()
        self.client_id = self.upward[0].hello.client_id

    def flush(self) -> None:
        self.upward += [
            pb.DraftRequest.FromString(one.message().SerializeToString()) for one in self.core.dialogue.outgoing()
        ]

    def serve(self, most: int = 1 << 30) -> int:
        """Let the service answer some messages; returns how many."""
        count = 0
        while self.upward and count < most:
            self.downward.append(self.service.answer(self.client_id, self.upward.popleft()))
            count += 1
        return count

    def deliver(self, most: int = 1 << 30) -> None:
        """Let some answers arrive."""
        count = 0
        while self.downward and count < most:
            self.core.receive(self.downward.popleft())
            self.flush()
            count += 1

    def settle(self) -> None:
        """Let everything arrive."""
        self.flush()
        while self.serve():
            self.deliver()
        self.deliver()

    def cut(self) -> None:
        """What is on its way is lost."""
        self.upward.clear()
        self.downward.clear()
        self.core.hang_up()

    def draft(self, progress, *, in_time: bool = True) -> DraftBatch:
        turn = self.core.draft(progress)
        self.flush()
        if in_time:
            self.settle()
        return self.core.settle(turn)


def connected(guess=lambda _text, _limit: [], **options) -> Wire:
    wire = Wire(FakeService(guess), **options)
    wire.connect()
    wire.settle()
    return wire


def start(core: Core, sequence_id: int, prompt: list[int], **options) -> None:
    core.start(sequence_id, array(prompt), **{"session_id": None, "request_id": None, "learn": True, **options})


def counting(text: list[int], limit: int) -> list[int]:
    """The guess that numbers go up."""
    return list(range(text[-1] + 1, text[-1] + 1 + limit))


def finish(core: Core, sequence_id: int, tokens: list[int], **outcome) -> None:
    core.finish(sequence_id, array(tokens), **{"verified": 0, "accepted": 0, "learn": True, **outcome})
