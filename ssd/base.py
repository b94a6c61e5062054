"""Base class of drafters over a corpus: running sequences, sessions between turns, and forgetting.

A subclass decides what to draft: `SuffixDrafter` and `ClassicDrafter`.
"""

from __future__ import annotations

import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import ClassVar, Self

import numpy as np

from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import check_tokens, token_array
from ssd.corpus.rollout import Rollout
from ssd.kernels.probabilities import GLOBAL
from ssd.sequences.local_index import LocalIndex, Unsorted
from ssd.sequences.running import Idle, IdleSessions, Running, RunningById
from ssd.sequences.tables import (
    IS_SHARED,
    LIVE_END,
    NO_POINTER,
    OWNER,
    POINTERS,
    PUBLISHED,
    SIZE,
    TOTALS,
    Sequences,
)
from ssd.stats import Stats, VersionTotals
from ssd.types import PROPOSE_ID, DraftBatch, Drafter, Progress, check_seed, check_sequence_id

logger = logging.getLogger(__name__)

NO_TOKENS = np.empty(0, np.uint32)

LONG_PROMPT = 2048
"""Minimum number of new tokens of a prompt that another thread sorts. These take 0.14 ms, and 100,000 take 15 ms; with
1,500, `start` takes as long whether it sorts them or passes them to the thread."""

PROPOSE_SESSION = ("propose",)
"""Session id of the sequence that `propose` keeps, so that only tokens after a shared prefix are indexed."""


class CorpusDrafter(Drafter):
    """Base of the drafters that share a `Corpus`. One thread at a time may use a drafter."""

    corpus: Corpus
    PUBLISHES: ClassVar[bool]
    """Whether drafts may come from running requests, so that committed tokens go to the corpus's live tier."""

    def __init__(
        self,
        config: DrafterConfig | None = None,
        *,
        corpus: Corpus | None = None,
        stats: Stats | None = None,
        remember: Callable[[np.ndarray, str | None, int], object] | None = None,
        sorts_in_thread: bool = False,
    ) -> None:
        """Make a drafter over `corpus`, or over a new one that a background thread maintains until `close`.

        config: settings; a given corpus determines capacity and match depth. stats: counters to add to. remember:
        called with the tokens, the request id and the tag of each finished request instead of `corpus.append`; it must
        copy the tokens. sorts_in_thread: whether a thread sorts the positions of long prompts (`LONG_PROMPT`), so that
        `start` returns before; until then, the drafts of a sequence need no match in its prompt, and depend on when the
        thread ends. Raises ValueError for a capacity or match depth that differs from both the default and the
        corpus's.
        """
        config = config or DrafterConfig()
        self.config = config if corpus is None else _fitted(config, corpus)
        self.stats = stats or Stats()
        self._owns_corpus = corpus is None
        self.corpus = corpus or Corpus.from_config(config)
        if self._owns_corpus:
            self.corpus.maintain(config.refresh_interval_s)
        self._remember = remember
        self._sequences = Sequences(config.max_draft)
        self.running = RunningById(self._sequences)
        """The running sequences."""
        # One thread, which begins with the first long prompt.
        self._sorter = ThreadPoolExecutor(1, "ssd-sort-prompt") if sorts_in_thread else None
        self._unsorted: dict[int, Future[Unsorted]] = {}
        """Positions of long prompts that the indices of running sequences lack, by row."""
        self._idle = IdleSessions(config.idle_sessions, config.idle_tokens)

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        hints: np.ndarray | None = None,
        committed: np.ndarray | None = None,
        session_id: Hashable = None,
        request_id: str | None = None,
        learn: bool = True,
        rollout: Rollout | None = None,
        seed: int | None = None,
    ) -> None:
        """Begin a sequence with its prompt, uint32 [P].

        hints: uint32 [H], text that the output may repeat, such as the file that it edits; drafts begin with its
        beginning, and it is searched like the prompt and never remembered. committed: uint32 [n], tokens that it has
        already produced elsewhere. session_id: turns of a conversation with the same id share an index: only the new
        part of a prompt is indexed and remembered. request_id: a name to forget the output by. learn: whether the
        output may ever be offered to other sequences. rollout: the problem that it samples, and with which version of
        the policy; drafts then use what was produced for the same problem as evidence of its own. seed: of the noise
        with which the target samples, if that is `ssd.kernels.noise.noise_of`, -2^63 to 2^63 - 1; None: greedy, or not
        known. Raises ValueError for an id in use or outside 0 to 2^64 - 2, for another seed, and for tokens as
        `Corpus.append`.
        """
        if session_id is not PROPOSE_SESSION:
            check_sequence_id(sequence_id)
        check_seed(seed)
        self.running.check_is_new(sequence_id)
        hinted = 0 if hints is None else len(hints)
        prompt = prompt if hints is None else np.concatenate([hints, prompt])
        text = prompt if committed is None else np.concatenate([prompt, committed])
        check_tokens(text)
        idle = self._idle.pop(session_id) if session_id is not None else None
        local = idle.local if idle is not None else LocalIndex(self.config.match_depth)
        turns = idle.turns if idle is not None else frozenset()
        # The output of earlier turns was remembered under their own request ids, and must be forgotten with them.
        first_learned = max(hinted, len(prompt) - self.config.learned_prompt_tokens, local.shared_with(prompt))
        running = Running(
            first_learned,
            len(text),
            session_id,
            request_id,
            turns | {request_id},
            learn,
            rollout,
        )
        # At once, so that the text is not moved while it is sorted.
        local.reserve(self._sequences.room_for(len(text)))
        unsorted, sorting = local.continue_with(text), None
        if self._sorter is not None and len(unsorted.added) >= LONG_PROMPT:
            sorting = self._sorter.submit(unsorted.sort)
        else:
            local.adopt(unsorted.sort())
        owner = self.corpus.start_running()
        try:
            running.row = self._sequences.add(
                local,
                owner,
                is_predicted=hinted > 0 and len(text) == len(prompt),
                shared_from=first_learned if learn and self.PUBLISHES else None,
                tag=running.tag,
                seed=seed,
                hinted=hinted,
            )
        except BaseException:
            self.corpus.end_running(owner)
            raise
        if sorting is not None:
            self._unsorted[running.row] = sorting
        self.running.add(sequence_id, running)

    def draft(self, progress: Progress) -> DraftBatch:
        """Commit the tokens that the target produced, and draft what may follow.

        Raises ValueError for a sequence that is not running or that appears twice in the batch, for more tokens
        verified than the last draft had, for a reserved token id, for arrays as `Progress.check_arrays`, and for a
        cost outside (0, 1].
        """
        drafts = self.draft_unpublished(progress)
        self.publish()
        return drafts

    def propose(self, context: Sequence[int] | np.ndarray, max_draft: int | None = None) -> DraftBatch:
        """Return a draft for a single context that is not a started sequence, as a batch of one sequence.

        context: token ids, a list or uint32 [N]. max_draft: maximum draft length; None: as configured. The drafter
        keeps the last context, so that a call whose context extends it processes only the new tokens, which also
        calibrate the probabilities. Contexts are never used for drafts of other sequences. Raises ValueError for a
        reserved or negative token id.
        """
        text = token_array(context)
        limit = self.config.max_draft if max_draft is None else max_draft
        running, verified, added = self.running.get(PROPOSE_ID), 0, text[:0]
        before = NO_TOKENS if running is None else self._sequences.local(running.row).tokens
        if running is not None and len(before) <= len(text) and np.array_equal(before, text[: len(before)]):
            added = text[len(before) :]
            verified = int(self.running.offered_to([PROPOSE_ID])[0]) if len(added) else 0
        else:
            if running is not None:
                self.finish(PROPOSE_ID, NO_TOKENS, learn=False)
            self.start(PROPOSE_ID, text, session_id=PROPOSE_SESSION, learn=False)
        return self.draft(Progress.of_one(PROPOSE_ID, added, verified=verified, max_draft=max(0, limit)))

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, steps: int = 1, learn: bool = True
    ) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft.

        verified: number of tokens of the last draft that the target verified. steps: number of target steps that
        produced the tokens. learn: whether the output is remembered. Raises ValueError as `draft`.
        """
        if self._unsorted:
            self._adopt_sorted()
        rows = self.running.rows_of([sequence_id])
        last = Progress.of_one(sequence_id, tokens, verified=verified, steps=steps)
        last.min_path_prob = 1.0  # Nothing is drafted, so a token budget need not be prepared.
        self._step(rows, last)
        running = self.running.remove(sequence_id)
        if running.rollout is not None:
            steps, committed, verified, accepted = self._sequences.state[running.row, TOTALS:].tolist()
            totals = VersionTotals(1, steps, committed, verified, accepted, time.monotonic())
            self.stats.record_version(running.rollout.version, totals)
        if not learn:
            self._withdraw(running)
        self.corpus.end_running(self._owner_of(running))
        local = self._sequences.remove(running.row)
        if (unsorted := self._unsorted.pop(running.row, None)) is not None:
            unsorted.cancel()
            running.is_kept = False
        if learn and running.learn:
            remember = self._remember or self.corpus.append
            remember(local.tokens[running.first_learned :], running.request_id, running.tag)
        if running.session_id is not None and running.is_kept:
            self._idle.keep(running.session_id, Idle(local, running.turns, self.corpus.clock()))

    def use_corpus(self, corpus: Corpus) -> None:
        """Draft from another corpus from now on; running sequences and sessions remain. The caller closes both.

        Tokens that running sequences have produced so far are not offered to others any more. Raises ValueError for
        another match depth.
        """
        if corpus.depth != self.config.match_depth:
            raise ValueError(f"the corpus has match depth {corpus.depth}, this drafter {self.config.match_depth}")
        before, self.corpus = self.corpus, corpus
        for running in self.running:
            state = self._sequences.state[running.row]
            before.end_running(int(state[OWNER]))
            state[OWNER], state[PUBLISHED], state[LIVE_END] = corpus.start_running(), state[SIZE], 0
            state[POINTERS + 3 * GLOBAL] = NO_POINTER
        self._owns_corpus = False

    def withdraw_all(self) -> None:
        """Stop offering the text of running sequences to others, and end all idle sessions."""
        self._idle.drop(lambda _: True)
        for running in self.running:
            running.is_kept = False
            self._withdraw(running)

    def learnable_of(self, sequence_id: int) -> tuple[np.ndarray, np.ndarray, int, bool]:
        """Return what would be remembered if a running sequence ended now.

        These are the end of its prompt, uint32 [P], its output, uint32 [n], both valid until the next call, the number
        of target steps that produced the output, and whether it is remembered at all. Raises ValueError for a sequence
        that was not started.
        """
        row = self.running.rows_of([sequence_id])[0]
        running, text = self.running.get(sequence_id), self._sequences.local(row).tokens
        assert running is not None
        steps = int(self._sequences.state[row, TOTALS])
        return text[running.first_learned : running.given], text[running.given :], steps, running.learn

    def forget(self, request_id: str) -> None:
        """Forget what was produced under a request id: in the corpus (see `Corpus.forget`) and in this drafter.

        Call `forget_own` on the other drafters that share the corpus.
        """
        self.forget_own(request_id)
        self.corpus.forget(request_id)

    def forget_older_than(self, age_s: float) -> None:
        """Forget what finished more than `age_s` seconds ago, and sessions that have been idle for longer."""
        self.corpus.forget_older_than(age_s)
        self.end_sessions_before(self.corpus.clock() - age_s)

    def memory_bytes(self) -> int:
        """Memory of the corpus, the running sequences, idle sessions and statistics."""
        return self.corpus.nbytes + self.stats.nbytes + self.own_bytes

    def close(self) -> None:
        """Forget the running sequences, and close the corpus if this drafter made it."""
        for running in self.running:
            self._withdraw(running)
            self.corpus.end_running(self._owner_of(running))
        self.running.clear()
        self._unsorted.clear()
        if self._sorter is not None:
            self._sorter.shutdown(wait=False, cancel_futures=True)
        self._idle.drop(lambda _: True)
        if self._owns_corpus:
            self.corpus.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # For the drafter service, which uses `running` as well; not part of the public interface.

    def draft_unpublished(self, progress: Progress) -> DraftBatch:
        """Do `draft`, except for `publish`. Raises ValueError as `draft`."""
        if not isinstance(progress.sequence_ids, np.ndarray):
            progress.check_arrays()
        if self._unsorted:
            self._adopt_sorted()
        return self._step(self.running.rows_of(progress.sequence_ids.tolist()), progress)

    def publish(self) -> None:
        """Offer the tokens of the last `draft_unpublished` to other sequences; call it before anything else."""
        if self.PUBLISHES:
            self.corpus.publish(self._sequences.state, self.running.last_rows)

    def forget_own(self, request_id: str) -> int:
        """Forget what was produced under a request id and is not in the corpus yet; return the number of sequences.

        A running sequence of that id continues, but from now on no other sequence is offered its output, and it is not
        remembered. Idle sessions with a turn of that id end.
        """
        forgotten = 0
        self._idle.drop(lambda idle: request_id in idle.turns)
        for running in self.running:
            running.is_kept &= request_id not in running.turns
            if running.request_id == request_id:
                forgotten += running.learn
                running.learn = False
                self._withdraw(running)
        return forgotten

    def end_sessions_before(self, moment: float) -> None:
        """End sessions that have been idle since before `moment`, by the corpus's clock."""
        self._idle.drop(lambda idle: idle.since < moment)

    @property
    def own_bytes(self) -> int:
        """Memory of the running sequences and idle sessions."""
        return self._sequences.nbytes + self._idle.nbytes

    @abstractmethod
    def _step(self, rows: np.ndarray, progress: Progress) -> DraftBatch:
        """Commit a batch's tokens and draft; rows: int64 [B], the sequences' rows in the tables.

        Raises ValueError, without any effect, as `draft`.
        """

    def _adopt_sorted(self) -> None:
        """Add the positions of the prompts that are sorted now to the indices of their sequences."""
        for row, sorting in [(row, sorting) for row, sorting in self._unsorted.items() if sorting.done()]:
            del self._unsorted[row]
            if (problem := sorting.exception()) is None:
                self._sequences.adopt(row, sorting.result())
            else:
                logger.warning("a prompt is not searched, since it was not sorted: %s", type(problem).__name__)

    def _withdraw(self, running: Running) -> None:
        """Stop offering what a running sequence produces to others."""
        state = self._sequences.state[running.row]
        if state[IS_SHARED]:
            state[IS_SHARED] = 0
            self.corpus.hide_running(int(state[OWNER]))
            self.corpus.fallback.remove_output(self._sequences.local(running.row).tokens, running.given)

    def _owner_of(self, running: Running) -> int:
        """Return a sequence's number in the live tier."""
        return int(self._sequences.state[running.row, OWNER])


def _fitted(config: DrafterConfig, corpus: Corpus) -> DrafterConfig:
    """Take capacity and match depth from a corpus. Raises ValueError if the configuration sets other values."""
    for name, own, default in (
        ("capacity", corpus.capacity, DrafterConfig.capacity),
        ("match_depth", corpus.depth, DrafterConfig.match_depth),
    ):
        if getattr(config, name) not in (own, default):
            raise ValueError(
                f"the corpus was made with {name}={own}, not {getattr(config, name)}; leave it out of the configuration"
            )
    return replace(config, capacity=corpus.capacity, match_depth=corpus.depth)
