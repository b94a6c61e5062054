"""The unanswered requests of a stream, and the backoff after late responses.

Every request is answered, in order. After a late response nothing is sent until it has arrived, so that the service
does not become slower. After several consecutive late responses, drafts are requested less often. Responses after long
texts do not count as late, since indexing these takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

from google.protobuf.message import DecodeError

from drafter_service.client.connection import RefusedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError

RESOURCE_EXHAUSTED = 8
"""The gRPC status code of an overloaded service."""

MAX_BACKOFF_DOUBLINGS = 6
"""Maximum number of doublings of the backoff: if a service is always late, one step in 64 waits for the deadline."""

DELAYING_BYTES = 8 << 10
"""A response after requests with this much text may be late because the text has to be indexed."""

Send = Callable[[bytes], None]
"""Sends a serialized request; never waits."""


class Phase(Enum):
    """State of the stream."""

    OFFLINE = auto()
    HANDSHAKE = auto()
    """The hello was sent and has not been answered."""
    READY = auto()


@dataclass(slots=True, eq=False)
class Pending:
    """A request, and the state of its response."""

    step: int
    """Number of the request."""
    sent_at: float
    text_bytes: int = 0
    """Bytes of text that it starts or ends with."""
    wants_drafts: bool = False
    is_delayed: bool = False
    """Whether it follows requests with much text."""
    is_over: bool = False
    """Whether it was answered, or its stream has ended."""
    is_late: bool = False
    """Whether nobody waits for its drafts any more."""
    drafts: pb.Drafts | None = None
    """The requested drafts, once they have arrived."""
    counters: pb.ClientCounters | None = None
    """The counters that it sends."""


class PendingRequests:
    """Numbers requests and matches responses, over consecutive streams."""

    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` returns seconds."""
        self.phase = Phase.OFFLINE
        self.dropped = 0
        """Number of draft responses that arrived after the deadline."""
        self._clock = clock
        self._step = 0
        self._send: Send = lambda _: None
        self._pending: deque[Pending] = deque()
        self._is_late = False
        """Whether drafts are outstanding after their deadline."""
        self._misses = 0
        """Number of consecutive late draft responses."""
        self._backoff_steps = 0
        """Number of steps to skip before drafts are requested again."""

    @property
    def may_send(self) -> bool:
        """Whether requests may be sent: the handshake is done and the service is not late."""
        return self.phase is Phase.READY and not self._is_late

    @property
    def has_pending(self) -> bool:
        """Whether any response is outstanding."""
        return bool(self._pending)

    @property
    def oldest_wait_s(self) -> float:
        """Seconds since the oldest pending request was sent; 0 without one."""
        return self._clock() - self._pending[0].sent_at if self._pending else 0.0

    def open(self, hello: pb.Hello, send: Send) -> None:
        """Begin a new stream with its handshake; `send` is called for each of its requests."""
        self.close()
        self.phase, self._send = Phase.HANDSHAKE, send
        self.send(pb.DraftRequest(hello=hello))

    def close(self) -> None:
        """End the stream, and discard its pending requests."""
        self.phase = Phase.OFFLINE
        for each in self._pending:
            each.is_over = True
        self._pending.clear()
        self._is_late = False
        self._misses = self._backoff_steps = 0

    def send(self, request: pb.DraftRequest, text_bytes: int = 0, *, wants_drafts: bool = False) -> Pending:
        """Number a request and send it. text_bytes: bytes of text that it starts or ends with."""
        self._step += 1
        request.step = self._step
        pending = Pending(self._step, self._clock(), text_bytes, wants_drafts)
        if request.HasField("counters"):
            pending.counters = request.counters
        if self._pending and wants_drafts:
            pending.is_delayed = sum(each.text_bytes for each in self._pending) >= DELAYING_BYTES
        self._pending.append(pending)
        self._send(request.SerializeToString())
        return pending

    def receive(self, data: bytes) -> tuple[pb.DraftResponse, Pending]:
        """Return a response, and its request, the oldest pending one.

        Raises RefusedError if the handshake is refused, and WireError for any other error, for a response that does not
        belong to the oldest pending request, and for one that cannot be parsed.
        """
        try:
            response = pb.DraftResponse.FromString(data)
        except DecodeError:
            raise WireError("a message is not a DraftResponse") from None
        if not self._pending or self._pending[0].step != response.step:
            raise WireError(f"response {response.step} is out of order")
        if response.HasField("error"):
            is_refused = self.phase is Phase.HANDSHAKE and response.error.code != RESOURCE_EXHAUSTED
            raise (RefusedError if is_refused else WireError)(response.error.message)
        answered = self._pending.popleft()
        answered.is_over = True
        if self.phase is Phase.HANDSHAKE:
            self.phase = Phase.READY
        elif answered.wants_drafts:
            answered.drafts = response.drafts
        if answered.is_late:
            self._is_late = False
            self.dropped += 1
        return response, answered

    def may_request_drafts(self) -> bool:
        """Return whether to request drafts in this step. Call it once per step."""
        if not self.may_send:
            return False
        if self._backoff_steps:
            self._backoff_steps -= 1
            return False
        return True

    def stop_waiting(self, request: Pending) -> None:
        """Record that the engine continues with the drafts of a request, or without them if it is not over."""
        # Each consecutive miss doubles the number of skipped steps.
        if request.is_over:
            self._misses = 0
        else:
            self._is_late = request.is_late = True
            self._misses += not request.is_delayed
        self._backoff_steps = (1 << min(max(0, self._misses - 1), MAX_BACKOFF_DOUBLINGS)) - 1
