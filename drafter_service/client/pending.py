"""The unanswered requests of a stream, and the backoff after late responses.

Every request is answered, in order. After a late response nothing is sent until it has arrived, so that the service
does not become slower. After several consecutive late responses, drafts are requested less often. Responses after long
texts do not count as late, since indexing these takes time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

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


class Pending(NamedTuple):
    """A request that is not answered yet."""

    step: int
    sent_at: float
    wants_drafts: bool
    text_bytes: int


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
        self._awaited: int | None = None
        """Number of the request whose drafts the caller waits for."""
        self._drafts: pb.Drafts | None = None
        """Drafts of the awaited request, once they have arrived."""
        self._is_late = False
        """Whether drafts are outstanding after their deadline."""
        self._is_delayed = False
        """Whether the awaited response follows requests with much text."""
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
        self._pending.clear()
        self._awaited = self._drafts = None
        self._is_late = False
        self._misses = self._backoff_steps = 0

    def send(self, request: pb.DraftRequest, text_bytes: int = 0, *, wants_drafts: bool = False) -> int:
        """Number a request and send it; return its number. text_bytes: bytes of text that it starts or ends with."""
        self._step += 1
        request.step = self._step
        self._pending.append(Pending(self._step, self._clock(), wants_drafts, text_bytes))
        self._send(request.SerializeToString())
        return self._step

    def receive(self, data: bytes) -> pb.DraftResponse:
        """Return a response, after matching it with the oldest pending request.

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
        if self.phase is Phase.HANDSHAKE:
            self.phase = Phase.READY
        elif answered.wants_drafts and answered.step == self._awaited:
            self._drafts = response.drafts
        elif answered.wants_drafts:
            self._is_late = False
            self.dropped += 1
        return response

    def may_request_drafts(self) -> bool:
        """Return whether to request drafts in this step. Call it once per step."""
        if not self.may_send:
            return False
        if self._backoff_steps:
            self._backoff_steps -= 1
            return False
        return True

    def request_drafts(self, request: pb.DraftRequest) -> int:
        """Send a request whose drafts the caller will wait for; return its number."""
        self._is_delayed = bool(self._pending) and sum(each.text_bytes for each in self._pending) >= DELAYING_BYTES
        self._awaited = self._step + 1
        return self.send(request, wants_drafts=True)

    def is_waiting(self, step: int) -> bool:
        """Return whether the drafts of a request are outstanding."""
        return self._awaited == step and self._drafts is None

    def is_cut(self, step: int) -> bool:
        """Return whether the stream of a request ended before the request was answered."""
        return self._awaited != step

    def take_drafts(self) -> pb.Drafts | None:
        """Stop waiting for the awaited drafts; return them if they have arrived."""
        drafts = self._drafts
        # Each consecutive miss doubles the number of skipped steps.
        if drafts is not None:
            self._misses = 0
        elif not self._is_delayed:
            self._misses += 1
        self._backoff_steps = (1 << min(max(0, self._misses - 1), MAX_BACKOFF_DOUBLINGS)) - 1
        self._is_late = drafts is None
        self._awaited = self._drafts = None
        return drafts
