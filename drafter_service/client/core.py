"""What a client says and understands, without a connection and without a thread.

The engine's calls and the service's responses go in, messages and drafts come out. Whoever drives it sends
`dialogue.outgoing()` after every call, and lets one thread at a time in.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count
from time import monotonic

import numpy as np

from drafter_service.client.about import About
from drafter_service.client.answers import read_answer
from drafter_service.client.counters import Counters
from drafter_service.client.dialogue import Dialogue, Phase
from drafter_service.client.ended import EndedSequences
from drafter_service.client.introductions import LOT_BYTES, Introductions
from drafter_service.client.messages import MOST_TEXT_BYTES, PROTOCOL, batch_message, endings, read_welcome
from drafter_service.client.outgoing import Outgoing
from drafter_service.client.running import News, Running
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError, unpack
from ssd.corpus.ring import check_tokens
from ssd.types import DraftBatch, Progress, check_verified, offsets_of

CLIENT_ID_BYTES = 16

COUNTERS_EVERY = 64
"""Batches between two messages with counters."""

MOST_NAME_BYTES = 512
NO_LIMIT = np.zeros(1, np.uint32)
NO_ROWS = np.zeros(0, np.int64)
NO_IDS: frozenset[int] = frozenset()

Places = np.ndarray | slice
"""Some sequences of a batch: int64 [A], or a slice."""
ALL, NONE = slice(None), slice(0)


@dataclass(slots=True, eq=False)
class Turn:
    """One step of the engine, from its call to the drafts that it gets."""

    rows: np.ndarray
    """int64 [B]."""
    limits: np.ndarray
    """uint32 [B]: how many tokens the engine can use."""
    asked: Places = field(default_factory=lambda: NONE)
    """For which sequences of the batch the service was asked."""
    step: int | None = None
    """The number of that message; None if it was not asked."""


class Core:
    """All that a client knows."""

    def __init__(
        self,
        hello: pb.Hello,
        *,
        clock: Callable[[], float] = monotonic,
        random_bytes: Callable[[int], bytes] = secrets.token_bytes,
    ) -> None:
        """`hello`: who the client is and what is served; the rest of it is filled in here."""
        self.dialogue = Dialogue(clock)
        self._counters = Counters()
        self._hello = hello
        self._random_bytes = random_bytes
        self._client_id = random_bytes(CLIENT_ID_BYTES)
        self._name = self._client_id.hex()
        self._was_welcome = False
        self._started = 0
        self._wire_ids = count(1)
        self._batches = 0
        self._running = Running()
        self._ended = EndedSequences()
        self._introductions = Introductions(self._running, self.dialogue, self._wire_ids)

    @property
    def counters(self) -> Counters:
        """Totals since the client began."""
        self._counters.dropped = self.dialogue.dropped
        self._counters.unlearned = self._ended.let_go
        return self._counters

    # What the engine does.

    def start(
        self, sequence_id: int, prompt: np.ndarray, *, session_id: str | None, request_id: str | None, learn: bool
    ) -> None:
        """Begin a sequence. Raises ValueError for an id in use, a token out of range, and a name that is too long."""
        if sequence_id in self._running.row_of:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")
        check_tokens(prompt)
        for what, name in (("session_id", session_id), ("request_id", request_id)):
            if name is not None and len(name.encode()) > MOST_NAME_BYTES:
                raise ValueError(f"{what} has at most {MOST_NAME_BYTES} bytes")
        self._started += 1
        # Told again, it has the name that it was told under before, and is learned once.
        name = request_id or f"{self._name}-{self._started}"
        row = self._running.add(sequence_id, About(np.array(prompt, np.uint32), session_id or "", name, learn))
        self._introductions.introduce(row)

    def draft(self, progress: Progress) -> Turn:
        """Record what was committed, and ask the service for drafts.

        `settle` it once `is_settled`, or when there is no more time. Raises ValueError as `Progress.check`.
        """
        rows = self._running.rows_of(progress)
        turn = Turn(rows, progress.max_draft)
        may_ask = self.dialogue.may_send and self.dialogue.is_rested()
        if may_ask and self._running.is_plain(rows):
            self._ask(turn, ALL, self._running.pass_on(rows, progress), progress.cost)
            return turn
        self._running.commit(rows, progress)
        is_known = self._running.is_known(rows)
        self._running.want(rows[~is_known])
        if may_ask and np.count_nonzero(is_known):
            asked = is_known.nonzero()[0]
            self._ask(turn, asked, self._running.tell(rows[asked]), progress.cost)
        elif not may_ask and len(rows):
            self._counters.timeouts += self.dialogue.phase is Phase.READY
        self._introductions.go_on()  # Behind the batch, which need not wait for it.
        return turn

    def is_settled(self, turn: Turn) -> bool:
        """Whether the drafts have come, or never will."""
        return turn.step is None or not self.dialogue.is_waiting(turn.step)

    def settle(self, turn: Turn) -> DraftBatch:
        """The drafts of a turn, as far as they have come."""
        drafts = None
        if turn.step is not None and not self.dialogue.was_cut(turn.step):
            message = self.dialogue.take()
            if message is None:
                self._counters.timeouts += 1
            else:
                drafts = self._read(turn, message)
        if drafts is None:
            drafts = DraftBatch.empty(len(turn.rows))
        self._running.hand_over(turn.rows, drafts.offsets[1:] - drafts.offsets[:-1])
        return drafts

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int, learn: bool) -> None:
        """End a sequence. Raises ValueError as `Drafter.finish`."""
        running = self._running
        check_tokens(tokens)
        rows = np.array([running.row_of[sequence_id]]) if sequence_id in running.row_of else NO_ROWS
        check_verified(sequence_id, verified, dict(zip([sequence_id], running.offered(rows), strict=False)))
        running.commit(rows, _last_progress(sequence_id, tokens, verified))
        self._ended.add(running.end(sequence_id, learn))
        self._tell_ended()

    def say_goodbye(self) -> None:
        """End what still runs, nothing of which is learned, and tell of all that has ended."""
        for sequence_id in list(self._running.row_of):
            self._ended.add(self._running.end(sequence_id, learn=False))
        if self.dialogue.may_send:
            while self._tell_ended():
                pass
            self.dialogue.send(Outgoing(pb.DraftRequest(counters=self.counters.message())))

    # What the connection does.

    def greet(self) -> None:
        """A stream was opened. The service is told nothing but who is there until it has answered."""
        hello = pb.Hello()
        hello.CopyFrom(self._hello)
        hello.protocol = hello.oldest_protocol = PROTOCOL
        hello.client_id = self._client_id
        self.dialogue.open(hello)

    def receive(self, response: pb.DraftResponse) -> None:
        """A response has come.

        Raises RefusedError for a service that does not serve this client, and WireError for one that breaks the
        contract: then hang up with `is_doubtful`.
        """
        is_greeted = self.dialogue.phase is Phase.READY
        self.dialogue.receive(response)
        if is_greeted:
            lost = {*unpack(response.lost_ids, "u8", "lost_ids").tolist()} if response.lost_ids else NO_IDS
            self._counters.resyncs += self._running.lose(lost)
            self._ended.answered(response.step, lost)
            self._introductions.answered(response.step)
        else:
            self._be_welcome(response)
        self._tell_ended()
        self._introductions.go_on()

    def hang_up(self, *, is_doubtful: bool = False) -> None:
        """The stream has ended. `is_doubtful`: so is what the service knows; from now on this is a new client to it."""
        self.dialogue.close()
        if is_doubtful:
            self._client_id = self._random_bytes(CLIENT_ID_BYTES)

    def _be_welcome(self, response: pb.DraftResponse) -> None:
        """The service has said what it has of this client's sequences."""
        resumed = read_welcome(response)
        self._introductions.begin(response.welcome)
        self._counters.reconnects += self._was_welcome
        self._was_welcome = True
        self._counters.resyncs += self._running.resume(resumed)
        self._ended.resume(resumed)
        strangers = resumed.keys() - self._running.known_wire_ids() - self._ended.known_wire_ids()
        if strangers:
            finishes = [pb.Finish(sequence_id=wire_id) for wire_id in sorted(strangers)]
            self.dialogue.send(Outgoing(pb.DraftRequest(finishes=finishes)))

    # What the service is told.

    def _ask(self, turn: Turn, asked: Places, news: News, cost: float | None) -> None:
        """Ask for drafts."""
        request = pb.DraftRequest(batch=batch_message(news, turn.limits[asked], cost))
        self._batches += 1
        if self._batches % COUNTERS_EVERY == 0:
            request.counters.CopyFrom(self.counters.message())
        turn.asked, turn.step = asked, self.dialogue.ask(request)

    def _tell_ended(self) -> bool:
        """Tell of sequences that have ended, as many as go into one message; whether there were any."""
        if not self.dialogue.may_send or not self._ended.are_due:
            return False
        self._ended.let_go_beyond(MOST_TEXT_BYTES, self._introductions.most_tokens)
        lot = self._ended.next_lot(LOT_BYTES, self._introductions.room())
        if lot:
            self._ended.tell(lot, self.dialogue.send(endings(lot, self._wire_ids)))
        return bool(lot)

    # Small things.

    def _read(self, turn: Turn, message: pb.Drafts) -> DraftBatch | None:
        """The drafts that have come; None if the message cannot be read."""
        limits = turn.limits[turn.asked]
        try:
            drafts, malformed = read_answer(message, limits, self._hello.model.vocabulary_size)
        except WireError:
            self._counters.malformed += len(limits)
            return None
        self._counters.malformed += malformed
        if len(limits) == len(turn.limits):
            return drafts
        # The sequences that the service does not know have no draft.
        sizes = np.zeros(len(turn.limits), np.int64)
        sizes[turn.asked] = drafts.offsets[1:] - drafts.offsets[:-1]
        return replace(drafts, offsets=offsets_of(sizes))


def _last_progress(sequence_id: int, tokens: np.ndarray, verified: int) -> Progress:
    """A sequence's end as the progress of a batch."""
    return Progress(
        np.array([sequence_id], np.uint64),
        tokens,
        offsets_of(np.array([len(tokens)])),
        np.array([verified], np.uint32),
        NO_LIMIT,
    )
