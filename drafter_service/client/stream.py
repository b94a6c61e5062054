"""What the synchronous client needs of a stream."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from drafter_service.client.outgoing import Outgoing
from drafter_service.stubs import drafter_pb2 as pb


class Stream(Protocol):
    """A Draft stream that is open.

    Two threads have it: the engine's, which sends, and waits for drafts, and one that `pump`s until the end. They take
    turns with everything but `wait` and `pump`.
    """

    @property
    def failure(self) -> Exception | None:
        """Why it ended, if not in good order. Known when `pump` has returned and everything was received."""

    def send(self, messages: Sequence[Outgoing]) -> None:
        """Have messages sent; never waits."""

    def end(self) -> None:
        """Nothing more will be sent."""

    def receive(self) -> list[pb.DraftResponse]:
        """What has come; never waits."""

    def wait(self, timeout_s: float) -> bool:
        """Wait until there may be something to receive, or it is closed; whether there may be."""

    def watch(self) -> None:
        """`pump` is to call when something has come: an answer is owed, and nobody waits for it."""

    def pump(self, on_arrival: Callable[[], None]) -> None:
        """Keep it going until its end. Calls, from time to time, when there may be something to receive."""

    def cancel(self) -> None:
        """Break it off."""

    def close(self) -> None:
        """Nobody needs it any more: release everything, and whoever waits."""

    def abandon(self) -> None:
        """This process is a fork, and the stream another's: release what can be released without harm to it."""
