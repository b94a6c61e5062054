"""The face of the package: a drafter that remembers, embedded in the calling process."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from types import TracebackType
from weakref import WeakSet

import numpy as np

from ssd.config import DrafterConfig, check_cost
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import check_tokens
from ssd.kernels.frame import Frame
from ssd.kernels.step import BAD_OUTCOME, BAD_TOKEN, DONE, LACKS_ROOM, step
from ssd.outcomes import propose_after
from ssd.sequences.idle import Idle, IdleSessions
from ssd.sequences.local_index import LocalIndex
from ssd.sequences.tables import NODES, OWNER, SIZE, Sequences
from ssd.stats import Stats
from ssd.types import DraftBatch, Outcomes, Progress, offsets_of

NO_LIMIT = np.zeros(1, np.uint32)
ONE_EACH = np.empty(0, np.uint32)
"""Steps of sequences that took one each."""

Drafted = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]


@dataclass(eq=False)
class Running:
    """What is kept of a sequence beside its row in the tables."""

    lead: int
    """How many of the prompt's tokens are not remembered with the output."""
    told: int
    """How many tokens it had when others were last told of it, or when it began."""
    session_id: Hashable
    request_id: str | None
    holds: frozenset[str | None]
    """The names of this request and of its session's turns before it."""
    learn: bool
    """Whether others may draft what it produces; no more once its name was forgotten."""
    is_kept: bool = True
    """Whether the session's next turn may have its index."""
    row: int = -1
    """None before it begins."""


@dataclass(eq=False)
class Opening:
    """A sequence that is about to begin."""

    text: np.ndarray
    """uint32 [N]: its prompt, and what it has produced already."""
    local: LocalIndex
    running: Running
    is_indexed: bool = False

    def index(self) -> None:
        """Index the text, 0.2 us a token, unless that was done before. Any thread may do it."""
        if not self.is_indexed:
            self.local.continue_with(self.text)
            self.is_indexed = True


class SuffixDrafter:
    """Drafts from everything that was finished, from what runs, and from each running request itself.

    One thread at a time may use it. Several drafters can share a corpus, each with its own running sequences.
    """

    def __init__(
        self,
        config: DrafterConfig | None = None,
        *,
        corpus: Corpus | None = None,
        stats: Stats | None = None,
        remember: Callable[[np.ndarray, str | None], object] | None = None,
    ) -> None:
        """Without `corpus` the drafter has one of its own, refreshed in the background until `close`.

        `remember` is told what finished requests produced, and their names, in place of `corpus.append`; like that it
        copies the tokens. Raises ValueError for a corpus of another match depth.
        """
        self.config = config or DrafterConfig()
        if corpus is not None and corpus.depth != self.config.match_depth:
            raise ValueError(
                f"the corpus was made for a match depth of {corpus.depth}, not {self.config.match_depth}; "
                "make it with new_corpus(config)"
            )
        self.stats = stats or Stats()
        self._owns_corpus = corpus is None
        self.corpus = corpus or Corpus(self.config.capacity, self.config.match_depth)
        if self._owns_corpus:
            self.corpus.maintain(self.config.refresh_interval_s)
        self._remember = remember or self.corpus.append
        self._is_tree = self.config.shape == "tree"
        self._is_telling = False
        self._sequences = Sequences(self.config.max_draft)
        self._frame = Frame(self._sequences, self.corpus.odds, self.stats)
        self._state = self._sequences.state
        self._running: dict[int, Running] = {}
        self._opened: WeakSet[Running] = WeakSet()
        """What runs, and what is about to."""
        self._idle = IdleSessions(self.config.idle_sessions, self.config.idle_tokens)

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        committed: np.ndarray | None = None,
        session_id: Hashable = None,
        request_id: str | None = None,
        learn: bool = True,
    ) -> None:
        """Begin a sequence with its prompt, uint32 [P].

        committed: uint32 [n], what it has produced already elsewhere. session_id: turns of a conversation that have the
        same one share an index: only the new part of a prompt costs time, and is remembered. request_id: a name to
        forget what it produced by. learn: whether others may ever draft what it produces. Raises ValueError for an id
        in use and for tokens as `Corpus.append`.
        """
        self._check_is_new(sequence_id)
        self.begin(
            sequence_id,
            self.open(prompt, committed=committed, session_id=session_id, request_id=request_id, learn=learn),
        )

    def open(
        self,
        prompt: np.ndarray,
        *,
        committed: np.ndarray | None = None,
        session_id: Hashable = None,
        request_id: str | None = None,
        learn: bool = True,
    ) -> Opening:
        """What `start` takes, checked; for `Opening.index` in another thread if it is long, then `begin`."""
        text = prompt if committed is None else np.concatenate([prompt, committed])
        check_tokens(text)
        idle = self._idle.take(session_id) if session_id is not None else None
        local = idle.local if idle is not None else LocalIndex(self.config.match_depth)
        holds = idle.holds if idle is not None else frozenset()
        # What earlier turns held was remembered under their names, and must be forgotten with them.
        lead = max(0, len(prompt) - self.config.learned_prompt_tokens, local.shared_with(prompt))
        running = Running(lead, len(text), session_id, request_id, holds | {request_id}, learn)
        self._opened.add(running)
        return Opening(text, local, running)

    def begin(self, sequence_id: int, opening: Opening) -> None:
        """Begin what was opened. Raises ValueError for an id in use."""
        self._check_is_new(sequence_id)
        opening.index()
        running = opening.running
        shown = opening.text[running.lead :] if running.learn else None
        running.row = self._sequences.add(opening.local, self.corpus.begin(shown))
        if self._sequences.state is not self._state:
            self._state = self._sequences.state
            self._frame = Frame(self._sequences, self.corpus.odds, self.stats)
        self._running[sequence_id] = running

    def draft(self, progress: Progress) -> DraftBatch:
        """Take note of what was committed and draft what may follow.

        Raises ValueError for a sequence that is not running or stands in the batch twice, for more tokens verified than
        were offered, for a token id that is reserved, for arrays as `Progress.check_arrays`, and for a cost that no
        token can have.
        """
        progress.check_arrays()
        rows = self._rows_of(progress.sequence_ids.tolist())
        drafts, size = self._step(rows, progress)
        self._tell(rows, progress)
        tokens, parents, accept_prob, source, offsets = drafts
        return DraftBatch(tokens[:size], parents[:size], accept_prob[:size], source[:size], offsets)

    def propose_after(self, outcomes: Outcomes) -> DraftBatch:
        """Draft after each of K possible outcomes of verifying the last drafts, as if it had been committed.

        Changes nothing that later drafts depend on. See `ssd.outcomes`. Raises ValueError as `draft`.
        """

        def step(rows: np.ndarray, progress: Progress) -> DraftBatch:
            (tokens, parents, accept_prob, source, offsets), size = self._step(rows, progress)
            return DraftBatch(tokens[:size], parents[:size], accept_prob[:size], source[:size], offsets)

        rows = self._rows_of(outcomes.sequence_ids.tolist())
        return propose_after(outcomes, rows, self._sequences, self.stats, step)

    def finish(self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, learn: bool = True) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft. Raises ValueError as `draft`."""
        rows = self._rows_of([sequence_id])
        progress = Progress(
            np.array([sequence_id], np.uint64),
            tokens,
            offsets_of(np.array([len(tokens)], np.uint32)),
            np.array([verified], np.uint32),
            NO_LIMIT,
        )
        progress.check_arrays()
        self._step(rows, progress)
        running = self._running.pop(sequence_id)
        self._opened.discard(running)
        self.corpus.end(self._owner_of(running))
        local = self._sequences.remove(running.row)
        if learn and running.learn:
            self._remember(local.tokens[running.lead :], running.request_id)
        if running.session_id is not None and running.is_kept:
            self._idle.keep(running.session_id, Idle(local, running.holds, self.corpus.clock()))

    def forget(self, request_id: str) -> None:
        """Forget what was produced under a name, see `Corpus.forget`, and what this drafter has of it itself.

        Tell other drafters that share the corpus: `forget_own`.
        """
        self.corpus.forget(request_id)
        self.forget_own(request_id)

    def forget_older_than(self, age_s: float) -> None:
        """Forget what finished more than `age_s` seconds ago; sessions that are idle for longer end."""
        self.corpus.forget_older_than(age_s)
        self.end_sessions_before(self.corpus.clock() - age_s)

    def forget_own(self, request_id: str) -> None:
        """Forget what was produced under a name and is not in the corpus.

        What runs under it runs on, but after the next refresh nobody is shown what it produces, and it is not learned.
        Idle sessions with a turn of that name end.
        """
        self._idle.end(lambda idle: request_id in idle.holds)
        for running in self._opened:
            running.is_kept &= request_id not in running.holds
            if running.request_id == request_id:
                running.learn = False
                if running.row >= 0:
                    self.corpus.hide(self._owner_of(running))

    def end_sessions_before(self, time: float) -> None:
        """Sessions that have been idle since before `time`, by the corpus's clock, end."""
        self._idle.end(lambda idle: idle.since < time)

    def offered(self) -> dict[int, int]:
        """The running sequences, each with the tokens of its last draft."""
        nodes = self._sequences.state[:, NODES]
        return {sequence_id: max(0, int(nodes[running.row]) - 1) for sequence_id, running in self._running.items()}

    @property
    def running(self) -> int:
        """How many sequences run."""
        return len(self._running)

    @property
    def own_bytes(self) -> int:
        """Memory of the running sequences and idle sessions."""
        return self._sequences.nbytes + self._frame.nbytes + self._idle.nbytes

    def memory_bytes(self) -> int:
        """Memory of the corpus, the running sequences, idle sessions and statistics."""
        return self.corpus.nbytes + self.stats.nbytes + self.own_bytes

    def offered_to(self, sequence_ids: list[int]) -> np.ndarray:
        """How many tokens the last draft of each sequence had, int64 [n]; -1 for one that is not running."""
        running, nodes = self._running, self._sequences.state[:, NODES]
        rows = [running[sequence_id].row if sequence_id in running else -1 for sequence_id in sequence_ids]
        at = np.array(rows, np.int64)
        return np.where(at < 0, -1, np.maximum(0, nodes[at] - 1))

    def sizes(self) -> dict[int, int]:
        """The running sequences, each with how many tokens it has, prompt included."""
        sizes = self._sequences.state[:, SIZE]
        return {sequence_id: int(sizes[running.row]) for sequence_id, running in self._running.items()}

    def close(self) -> None:
        """Forget the running sequences and stop the background refresh of a corpus of its own."""
        for running in self._running.values():
            self.corpus.end(self._owner_of(running))
        self._running.clear()
        self._opened.clear()
        self._idle.end(lambda _: True)
        if self._owns_corpus:
            self.corpus.close()

    def __enter__(self) -> SuffixDrafter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_is_new(self, sequence_id: int) -> None:
        if sequence_id in self._running:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")

    def _owner_of(self, running: Running) -> int:
        """Who it is in the live tier."""
        return int(self._sequences.state[running.row, OWNER])

    def _tell(self, rows: np.ndarray, progress: Progress) -> None:
        """Let others draft what was committed, if there are others."""
        watches = self.corpus.watches_running
        if watches != self._is_telling:
            self._is_telling = watches
            self._note_told(rows, progress)
        if watches:
            self.corpus.extend(self._sequences.state[rows, OWNER], progress.tokens, progress.offsets)

    def _note_told(self, rows: np.ndarray, progress: Progress) -> None:
        """Others have come, and hear what they missed; or the last of them has left."""
        committed = dict(zip(rows.tolist(), np.diff(progress.offsets.astype(np.int64)).tolist(), strict=True))
        depth = self.config.match_depth
        for running in self._running.values():
            tokens = self._sequences.local(running.row).tokens
            tokens = tokens[: len(tokens) - committed.get(running.row, 0)]
            missed, running.told = tokens[running.told :], len(tokens)
            if not self._is_telling or len(missed) == 0:
                continue
            if len(missed) > depth:
                self.corpus.skip(self._owner_of(running), tokens[-depth:])
            else:
                # No longer than the tokens that would lead in what comes behind a gap.
                owner = np.array([self._owner_of(running)], np.int64)
                self.corpus.extend(owner, missed, offsets_of(np.array([len(missed)], np.uint32)))

    def _rows_of(self, sequence_ids: list[int]) -> np.ndarray:
        running = self._running
        try:
            rows = [running[sequence_id].row for sequence_id in sequence_ids]
        except KeyError as missing:
            raise ValueError(f"sequence {missing.args[0]} was not started") from None
        if len(rows) > 1 and len(set(rows)) != len(rows):
            raise ValueError("a sequence stands in a batch twice")
        return np.array(rows, np.int64)

    def _step(self, rows: np.ndarray, progress: Progress) -> tuple[Drafted, int]:
        """Run the kernel; returns the arrays of a `DraftBatch` and how many tokens it has."""
        config = self.config
        cost = config.cost if progress.cost is None else progress.cost
        check_cost(cost)
        room = len(rows) * config.max_draft
        drafts = (
            np.empty(room, np.uint32),
            np.empty(room, np.int32),
            np.empty(room, np.float32),
            np.empty(room, np.uint8),
            np.empty(len(rows) + 1, np.uint32),
        )
        batch = (
            rows,
            progress.tokens,
            progress.offsets,
            progress.verified,
            progress.max_draft,
            ONE_EACH if progress.steps is None else progress.steps,
        )
        while True:
            outcome, number = self._run(batch, drafts, cost)
            if outcome == DONE:
                return drafts, number
            if outcome == BAD_TOKEN:
                check_tokens(progress.tokens)
            if outcome == BAD_OUTCOME:
                self._refuse_outcome(progress, number)
            assert outcome == LACKS_ROOM
            self._sequences.make_room(int(rows[number]), len(progress.tokens))

    def _run(self, batch: tuple[np.ndarray, ...], drafts: Drafted, cost: float) -> tuple[int, int]:
        """Call the kernel, on a view that is held for no longer: not by an error that a caller keeps, either."""
        config, view = self.config, self.corpus.view
        return step(
            self._frame.addresses,
            view.frame,
            batch,
            drafts,
            cost,
            config.match_depth,
            config.max_draft,
            self._is_tree,
        )

    def _refuse_outcome(self, progress: Progress, index: int) -> None:
        sequence_id = int(progress.sequence_ids[index])
        raise ValueError(
            f"sequence {sequence_id} was offered {self.offered()[sequence_id]} tokens; "
            f"it cannot have verified {progress.verified[index]}"
        )
