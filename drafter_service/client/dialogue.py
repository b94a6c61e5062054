"""The order of a stream: who owes whom an answer, and when the service may be asked again.

Every message is answered, in order. A service that is late is sent nothing more before it has caught up, so it is not
made slower; one that was late again and again is left alone for ever more steps. That does not count steps behind long
texts, which take their time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from enum import Enum, auto
from typing import NamedTuple

from drafter_service.client.messages import RefusedError
from drafter_service.client.outgoing import Outgoing
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError

RESOURCE_EXHAUSTED = 8
"""The status code of a service that has too much to do now."""

MAX_REST_DOUBLINGS = 6
"""A service that is always late costs one deadline in 64 steps."""


HINDERING_BYTES = 8 << 10
"""A step behind a message with so much text to index may be late because of that alone."""


class Phase(Enum):
    """What the stream is good for."""

    OFFLINE = auto()
    GREETING = auto()
    """The service was greeted and has not answered."""
    READY = auto()


class Sent(NamedTuple):
    """A message that is not answered yet."""

    step: int
    at: float
    wants_drafts: bool
    text_bytes: int


class Dialogue:
    """Messages out and responses in, over one stream after the other."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.phase = Phase.OFFLINE
        self.dropped = 0
        """Drafts that came when nobody waited for them any more."""
        self._clock = clock
        self._step = 0
        self._unanswered: deque[Sent] = deque()
        self._outgoing: list[Outgoing] = []
        self._awaited: int | None = None
        """The step whose drafts are waited for."""
        self._drafts: pb.Drafts | None = None
        """They, once they have come."""
        self._is_behind = False
        """Whether the service owes drafts that nobody waits for any more."""
        self._is_hindered = False
        """Whether those that were asked for last come behind much text."""
        self._misses = 0
        """Steps in a row that were asked for and came too late."""
        self._rest_steps = 0
        """Steps before the service is asked again."""

    @property
    def may_send(self) -> bool:
        """Whether the service takes messages, and is not behind."""
        return self.phase is Phase.READY and not self._is_behind

    @property
    def is_owed(self) -> bool:
        """Whether the service owes an answer."""
        return bool(self._unanswered)

    @property
    def silent_s(self) -> float:
        """For how long the service has owed an answer, in seconds."""
        return self._clock() - self._unanswered[0].at if self._unanswered else 0.0

    def open(self, hello: pb.Hello) -> None:
        """A stream has begun."""
        self.close()
        self.phase = Phase.GREETING
        self.send(Outgoing(pb.DraftRequest(hello=hello)))

    def close(self) -> None:
        """The stream has ended; nobody answers any more."""
        self.phase = Phase.OFFLINE
        self._unanswered.clear()
        self._outgoing.clear()
        self._awaited = self._drafts = None
        self._is_behind = False
        self._misses = self._rest_steps = 0

    def send(self, message: Outgoing) -> int:
        """Number a message and have it sent; returns its step."""
        self._step += 1
        message.request.step = self._step
        wants_drafts = message.request.HasField("batch")
        self._unanswered.append(Sent(self._step, self._clock(), wants_drafts, message.text_bytes))
        self._outgoing.append(message)
        return self._step

    def outgoing(self) -> list[Outgoing]:
        """What is to be sent now, in order."""
        messages, self._outgoing = self._outgoing, []
        return messages

    def receive(self, response: pb.DraftResponse) -> None:
        """Take a response.

        Raises RefusedError for an error in place of a welcome, WireError for any other, and for an answer to something
        else than was asked.
        """
        if not self._unanswered or self._unanswered[0].step != response.step:
            raise WireError(f"it answered step {response.step} out of order")
        if response.HasField("error"):
            is_refused = self.phase is Phase.GREETING and response.error.code != RESOURCE_EXHAUSTED
            raise (RefusedError if is_refused else WireError)(response.error.message)
        sent = self._unanswered.popleft()
        if self.phase is Phase.GREETING:
            self.phase = Phase.READY
        elif sent.wants_drafts and sent.step == self._awaited:
            self._drafts = response.drafts
        elif sent.wants_drafts:
            self._is_behind = False
            self.dropped += 1

    def is_rested(self) -> bool:
        """Whether to ask for drafts in this step; a service that was late again and again is spared some steps."""
        if self._rest_steps == 0:
            return True
        self._rest_steps -= 1
        return False

    def ask(self, request: pb.DraftRequest) -> int:
        """Send a message whose drafts will be waited for; returns its step."""
        self._is_hindered = sum(sent.text_bytes for sent in self._unanswered) >= HINDERING_BYTES
        self._awaited = self.send(Outgoing(request))
        return self._awaited

    def is_waiting(self, step: int) -> bool:
        """Whether the drafts of a step may still come, and have not."""
        return self._awaited == step and self._drafts is None

    def was_cut(self, step: int) -> bool:
        """Whether the stream that a step was sent on has ended before it was answered."""
        return self._awaited != step

    def take(self) -> pb.Drafts | None:
        """Wait no more for the drafts that were asked for; returns them if they have come."""
        drafts = self._drafts
        # After each miss in a row let twice as many steps pass before asking again.
        if drafts is not None:
            self._misses = 0
        elif not self._is_hindered:
            self._misses += 1
        self._rest_steps = (1 << min(max(0, self._misses - 1), MAX_REST_DOUBLINGS)) - 1
        self._is_behind = drafts is None
        self._awaited = self._drafts = None
        return drafts
