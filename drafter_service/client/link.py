"""What a broken connection means, when to try again, and what the owner is told."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.metadata import version
from random import Random
from typing import TYPE_CHECKING

import grpc

from drafter_service.client.core import Core
from drafter_service.client.messages import RefusedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import MAX_MESSAGE_BYTES, WireError
from ssd.errors import UserError

if TYPE_CHECKING:  # It brings numba with it.
    from drafter_service.observability.facts import ModelIdentity

DEADLINE_S = 0.002
"""Longest wait for the drafts of one step."""

PATIENCE_S = 30.0
"""A service that has owed an answer for so long is gone, though its connection may stand."""

CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 2.0

FIRST_BACKOFF_S, LONGEST_BACKOFF_S = 0.1, 10.0

GOOD_ANSWERS = 16
"""A stream with so many was of use: the next failure is a new one, to wait for shortly and to be told of."""

OPTIONS = (
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
    # A new channel tries at once: how long to wait is decided here.
    ("grpc.use_local_subchannel_pool", 1),
)

REFUSALS = (
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
    grpc.StatusCode.UNIMPLEMENTED,
)
"""Before a welcome: trying again does not help."""

ABSENCES = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
"""Nobody answers."""


@dataclass(frozen=True)
class Parting:
    """Why a stream ended."""

    reason: str
    code: grpc.StatusCode | None = None
    is_final: bool = False
    """The service does not serve this client."""
    is_doubtful: bool = False
    """What the service knows is not to be relied on."""


class Link:
    """The state of a client's connection. It opens none itself."""

    def __init__(self, core: Core, rng: Random | None) -> None:
        self.lost: str | None = "it was not connected to yet"
        """Why there are no drafts now; None while there are."""
        self.parting: Parting | None = None
        """Why the last stream ended."""
        self._core = core
        self._rng = rng or Random()
        self._answers = 0
        """On this stream."""
        self._failures = 0
        """Streams in a row that were of no use."""
        self._is_told = False
        """Whether the owner knows of the present loss."""

    def receive(self, response: pb.DraftResponse) -> None:
        """Take a response. Raises what `Core.receive` does."""
        self._core.receive(response)
        self.lost = None
        self._answers += 1
        if self._answers == GOOD_ANSWERS:
            self._failures = 0
            self._is_told = False

    def end(self, parting: Parting) -> tuple[float | None, str | None]:
        """A stream has ended: how many seconds to wait before the next, None for ever; and news for the owner, if any.

        The wait is a random part of one that doubles from failure to failure, so that a service that comes back is not
        met by all its clients at once.
        """
        self._core.hang_up(is_doubtful=parting.is_doubtful)
        self._answers = 0
        self.parting = parting
        self.lost = parting.reason
        news = None if self._is_told else parting.reason
        self._is_told = True
        if parting.is_final:
            return None, news
        longest = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** min(self._failures, 30))
        self._failures += 1
        return self._rng.uniform(0, longest), news

    def parting_of(self, problem: Exception | None) -> Parting:
        """What an exception says about the end of a stream; None: the service ended it in good order."""
        if problem is None:
            return Parting("it ended the stream")
        if isinstance(problem, RefusedError):
            return Parting(str(problem), is_final=True)
        if isinstance(problem, WireError):
            return Parting(f"it and this client disagree: {problem}", is_doubtful=True)
        if isinstance(problem, grpc.RpcError):
            code = problem.code()
            return Parting(
                str(problem.details() or code.name), code, is_final=self.lost is not None and code in REFUSALS
            )
        if isinstance(problem, UserError):
            return Parting(str(problem))
        if isinstance(problem, OSError):
            return Parting(f"this process cannot connect: {problem.strerror or type(problem).__name__}")
        # Whatever the client was at, it did not finish; and the text of an error may hold anything.
        return Parting(f"this client failed: {type(problem).__name__}", is_doubtful=True)

    def failure(self, address: str) -> UserError:
        """The error for an owner who cannot do without the service."""
        start_one = f"start one with: ssd-drafter serve --listen {address}"
        parting = self.parting
        if parting is None or parting.code in ABSENCES:
            return UserError(f"no drafter answers at {address}; {start_one}")
        if parting.is_doubtful or parting.code is grpc.StatusCode.UNIMPLEMENTED:
            return UserError(f"something other than a drafter ({parting.reason}) answers at {address}; {start_one}")
        return UserError(f"the drafter at {address} does not serve this client: {parting.reason}")


def hello_of(model: ModelIdentity | None, namespace: str) -> pb.Hello:
    """Who the client is and what is served."""
    described = pb.Model()
    if model is not None:
        described = pb.Model(
            name=model.name,
            tokenizer=model.tokenizer,
            adapter=model.adapter,
            vocabulary_size=model.vocabulary_size,
        )
    return pb.Hello(client=f"ssd-drafter/{version('ssd-drafter')}", model=described, namespace=namespace)
