"""The client's protocol without a connection, and its messages to and from a simple reference service."""

from collections import deque

from drafter_service.client.protocol import Protocol
from drafter_service.stubs import drafter_pb2 as pb
from ssd.types import DraftBatch
from tests.drafter_service.fake_server import FakeService
from tests.strategies import array


class Wire:
    """A connection on which a test controls when messages arrive."""

    def __init__(self, service: FakeService, model: pb.Model | None = None) -> None:
        self.now = 0.0
        self.client = Protocol(pb.Hello(protocol=3, client="test/1", model=model), clock=lambda: self.now)
        self.service = service
        self.requests: deque[pb.DraftRequest] = deque()
        """Requests in flight."""
        self.responses: deque[pb.DraftResponse] = deque()

    def connect(self) -> None:
        self.client.connected(lambda data: self.requests.append(pb.DraftRequest.FromString(data)))

    def serve(self, limit: int = 1 << 30) -> int:
        """Let the service answer at most `limit` requests; return their number."""
        count = 0
        while self.requests and count < limit:
            self.responses.append(self.service.answer(self.requests.popleft()))
            count += 1
        return count

    def deliver(self, limit: int = 1 << 30) -> None:
        """Let at most `limit` responses arrive."""
        count = 0
        while self.responses and count < limit:
            self.client.receive(self.responses.popleft().SerializeToString())
            count += 1

    def settle(self) -> None:
        """Deliver all messages."""
        while self.serve():
            self.deliver()
        self.deliver()

    def cut(self) -> None:
        """Break the stream: messages in flight and the service's sequences are lost."""
        self.requests.clear()
        self.responses.clear()
        self.service.sequences.clear()
        self.client.disconnected()

    def draft(self, progress, *, in_time: bool = True) -> DraftBatch:
        turn = self.client.draft(progress)
        if in_time:
            self.settle()
        return self.client.settle(turn)


def connected(guess=lambda _text, _limit: [], **options) -> Wire:
    wire = Wire(FakeService(guess), **options)
    wire.connect()
    wire.settle()
    return wire


def start(client: Protocol, sequence_id: int, prompt: list[int], **options) -> None:
    client.start(sequence_id, array(prompt), **options)


def counting(text: list[int], limit: int) -> list[int]:
    """Draft a path in which each token is one more than the previous one."""
    return list(range(text[-1] + 1, text[-1] + 1 + limit))


def finish(client: Protocol, sequence_id: int, tokens: list[int], **outcome) -> None:
    client.finish(sequence_id, array(tokens), **{"verified": 0, "steps": 1, "learn": True, **outcome})
