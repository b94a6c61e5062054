"""Draft in the engine's process from a copy of the service's corpus, without a round trip for each step.

The service stays the home of the corpus: it learns, forgets and saves, and sends every change to the copies. What the
engine's requests produce goes to the service when they finish, and comes back to this copy from there, so that the
copy holds nothing that the service does not have. While the service cannot be reached, the copy is used for
`TRUSTED_S`: text that was forgotten meanwhile is not offered after that. Drafts then come from the engine's running
requests alone, until the copy has caught up.

This module imports numba, the rest of the client does not.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client.client import DrafterClient
from drafter_service.client.copies import EVERYTHING, Copy, Follower
from drafter_service.client.identity import process_name
from drafter_service.client.sequences import RemoteSequence
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.wire import PROTOCOL, pack
from ssd.budget.curve import StepCurve
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.ring import check_capacity, check_tokens
from ssd.corpus.rollout import Rollout
from ssd.drafter import SuffixDrafter
from ssd.stats import HITS, Counters
from ssd.types import DraftBatch, Progress

if TYPE_CHECKING:
    from drafter_service.observability.facts import ModelIdentity

logger = logging.getLogger(__name__)

MAX_TOKENS = 64 << 20
"""Largest number of tokens of a copy by default: 1 GB at most. Of a larger corpus it has the newest."""
OWN_TOKENS = 1 << 16
"""Capacity of the corpus that is used while there is no copy; it has no finished text."""
SENT_AFTER_S = 0.03
"""Time after which finished sequences are sent, several in a message. Another thread does it: the engine's thread would
wait for the interpreter's lock after waking others."""
COUNTED_S = 10.0
"""Interval at which counts of draft tokens are sent."""


class ReplicaClient(DrafterClient):
    """A client of the service that drafts in this process; see `DrafterClient`.

    The service gets what finished sequences leave to learn, and counts of draft tokens.
    """

    def __init__(
        self,
        address: str,
        *,
        config: DrafterConfig | None = None,
        max_tokens: int = MAX_TOKENS,
        model: ModelIdentity | None = None,
        namespace: str = "",
        access: ClientAccess | None = None,
        padding: Padding = NO_PADDING,
        on_copy_lost: Callable[[str], None] = logger.warning,
        **settings: Any,
    ) -> None:
        """config: settings of the drafter; its match depth must be the service's, and its capacity is ignored.
        max_tokens: largest number of tokens of the copy; of a larger corpus it has the newest. on_copy_lost: called
        from another thread with the reason why there is no copy, unless the service is only away. The others: as in
        `DrafterClient`, without `shadow`, where the service drafts.
        """
        if settings.get("shadow"):
            raise ValueError("shadow mode needs drafts of the service; use DrafterClient")
        check_capacity(max_tokens)
        config = replace(config or DrafterConfig(), capacity=OWN_TOKENS)
        self._local = SuffixDrafter(
            config,
            corpus=Corpus(OWN_TOKENS, config.match_depth),
            remember=lambda *_: None,
            curve=StepCurve.unknown(padding) if config.cost is None else None,
            sorts_in_thread=True,
        )
        self._own = self._local.corpus
        """Holds the text of this engine's running sequences while there is no copy."""
        identity = pb.Model() if model is None else pb.Model(**vars(model))
        self._vocab_size = identity.vocab_size
        request = pb.FollowRequest(
            protocol=PROTOCOL,
            model=identity,
            namespace=namespace,
            max_tokens=max_tokens,
            match_depth=config.match_depth,
            engine=settings.get("engine") or process_name(),
        )
        connector = Connector(Address.parse(address), access or ClientAccess())
        self._unsent: dict[int, RemoteSequence] = {}
        """The running sequences by their ids, without their texts."""
        self._unlearned = np.zeros(2, np.int64)
        """Numbers of steps and of tokens of sequences that were not learned."""
        self._sent_counts = [np.zeros_like(counts) for counts in self._counts]
        """Values of `_counts` that were sent."""
        self._finished: deque[tuple[RemoteSequence, np.ndarray, int]] = deque()
        """Sequences to be sent, with their outputs, uint32 [n], and the numbers of steps that produced these."""
        self._has_finished, self._is_stopping = threading.Event(), threading.Event()
        self._sender = threading.Thread(target=self._send_until_stopped, name="ssd-replica-send", daemon=True)
        self._counted_at = time.monotonic()
        self._own.maintain(self._local.config.refresh_interval_s)
        self.copy = Copy(request, self._local.config, max_tokens)
        self._followers = {"": Follower(connector, self.copy, on_copy_lost)}
        """By the name of a library; "" for the namespace itself."""
        try:
            self._sender.start()
            super().__init__(
                address,
                model=model,
                namespace=namespace,
                access=access,
                padding=padding,
                **{"draft_shape": config.draft_shape, **settings},
            )
        except BaseException:
            self._close_local()
            raise

    def start(
        self,
        sequence_id: int,
        prompt: np.ndarray,
        *,
        hints: np.ndarray | None = None,
        session_id: str | None = None,
        request_id: str | None = None,
        learn: bool = True,
        rollout: Rollout | None = None,
        seed: int | None = None,
    ) -> None:
        """See `DrafterClient.start`."""
        self._update()
        options: dict[str, Any] = {
            "hints": hints, "session_id": session_id, "request_id": request_id, "rollout": rollout, "seed": seed,
        }  # fmt: skip
        with self._lock:
            info = self._protocol.start_message(prompt, learn=learn, **options)
        may_learn = self.welcome is None or self.welcome.may_learn
        self._local.start(sequence_id, prompt, learn=learn and may_learn, **options)
        for name in ("prompt", "hints", "session_id"):  # What of them is learned follows at the end.
            info.ClearField(name)
        self._unsent[sequence_id] = RemoteSequence(info)

    def draft(self, progress: Progress) -> DraftBatch:
        """See `SuffixDrafter.draft`."""
        self._update()
        if (limit := self._draft_limit) is not None:
            progress = replace(progress, max_draft=np.minimum(progress.max_draft, np.uint32(limit)))
        return self._local.draft(progress)

    def begin_draft(self, progress: Progress) -> Callable[[], DraftBatch]:
        """Draft at once, and return a function that returns the drafts."""
        drafts = self.draft(progress)
        return lambda: drafts

    def draft_after(self, progress: Progress) -> DraftBatch:
        """See `SuffixDrafter.draft_after`."""
        return self._local.draft_after(progress)

    def propose(self, context: Sequence[int] | np.ndarray, max_draft: int | None = None) -> DraftBatch:
        """See `DrafterClient.propose`."""
        self._update()
        limit = self._local.config.max_draft if self._draft_limit is None else self._draft_limit
        return self._local.propose(context, limit if max_draft is None else min(limit, max_draft))

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, steps: int = 1, learn: bool = True
    ) -> None:
        """See `DrafterClient.finish`."""
        self._update()
        prompt, before, steps_before, may_learn = self._local.learnable_of(sequence_id)
        learned, output = pack(prompt, "u4"), np.concatenate([before, tokens])
        check_tokens(output, self._vocab_size)
        all_steps = steps_before + (steps if len(tokens) else 0)
        self._local.finish(sequence_id, tokens, verified=verified, steps=steps, learn=learn)
        sequence = self._unsent.pop(sequence_id)
        if learn and may_learn and not self._is_stopping.is_set():
            sequence.info.prompt = learned
            self._finished.append((sequence, output, all_steps))
            self._has_finished.set()
        else:
            self._unlearned += all_steps, len(output)

    def forget(self, request_id: str) -> None:
        """See `DrafterClient.forget`."""
        self._send_finished()
        self._local.forget(request_id)
        with self.copy.forgetting(request_id):
            self._local.corpus.refresh()
            super().forget(request_id)

    def close(self) -> None:
        """See `DrafterClient.close`. Drafts after it come from the engine's running requests alone."""
        if self._is_fork:
            super().close()
            return
        self._stop_sender()
        self._send_finished()
        self._send_counts()
        super().close()
        self._close_local()

    def _stop_sender(self) -> None:
        self._is_stopping.set()
        self._has_finished.set()
        if self._sender.is_alive():
            self._sender.join()

    def _close_local(self) -> None:
        """Release the copies, but not the drafter, which the engine's thread may use while another one closes."""
        self._stop_sender()
        for follower in [*self._followers.values()]:
            follower.close()
        self._own.close()

    def _send_until_stopped(self) -> None:
        while not self._is_stopping.is_set():
            if self._has_finished.wait(COUNTED_S):
                self._is_stopping.wait(SENT_AFTER_S)
                self._has_finished.clear()  # By this thread alone: another one might undo what `_stop_sender` sets.
            try:
                self._send_finished()
                if time.monotonic() - self._counted_at >= COUNTED_S:
                    self._send_counts()
            except Exception:
                logger.exception("finished sequences or counts were not sent")

    def _send_finished(self) -> None:
        """Send the finished sequences. Any thread may call it: they are taken with the lock."""
        while self._finished:
            self._queue(partial(self._protocol.send_finished, self._finished))

    def _update(self) -> None:
        """Use the newest copy, and forget what was forgotten."""
        self._check_process()
        corpus, changes = self.copy.take()
        corpus = corpus or self._own
        if changes or (corpus is not self._local.corpus and corpus is not self._own):
            # Nothing of the time without a copy is used again: it may have been forgotten.
            self._own.fallback.erase(self._own.clock())
        if corpus is not self._local.corpus:
            self._local.corpus.read_from()  # It may be used again, and must not keep copies of libraries.
            self._local.use_corpus(corpus)
        if self.copy.libraries or corpus.libraries:
            self._read_libraries(corpus)
        for change in changes:
            if change.WhichOneof("what") == "forgotten":
                self._send_finished()
                self._local.forget_own(change.forgotten)
                self._queue(partial(self._protocol.forget, change.forgotten))
            elif change is EVERYTHING or change.forgotten_before == math.inf:
                self._local.withdraw_all()
            else:
                self._local.end_sessions_before(change.forgotten_before)

    @property
    def _draft_limit(self) -> int | None:
        """Largest number of tokens of a draft if the service allows fewer than this client's settings."""
        welcome = self.welcome
        return welcome.max_draft if welcome is not None and welcome.max_draft < self._local.config.max_draft else None

    def _read_libraries(self, corpus: Corpus) -> None:
        """Follow the libraries of the namespace, and draft from those that can be trusted."""
        libraries = []
        for name in [name for name in self._followers if name and name not in self.copy.libraries]:
            threading.Thread(target=self._followers.pop(name).close, name="ssd-close", daemon=True).start()
        for name in self.copy.libraries:
            if name not in self._followers:
                self._followers[name] = self._followers[""].of_library(name)
                if self._is_stopping.is_set():  # `close` may not have seen it.
                    self._followers[name].close()
            copy = self._followers[name].copy
            library, _ = copy.take()  # What was forgotten is no text of this engine's requests.
            if library is not None:
                libraries.append(library)
        if libraries != list(corpus.libraries):
            corpus.read_from(*libraries)

    @property
    def _counts(self) -> list[np.ndarray]:
        """The drafter's counters and `_unlearned`."""
        return [*self._local.stats.counters, self._unlearned]

    def _send_counts(self) -> None:
        """Send the counts since those that were sent last, if there is a connection. Any thread may call it."""
        self._counted_at = time.monotonic()
        self._queue(self._send_new_counts)

    def _send_new_counts(self) -> None:
        # A copy, and nothing is set back, because a draft may count at the same time.
        counts = [each.copy() for each in self._counts]
        *new, unlearned = [now - sent for now, sent in zip(counts, self._sent_counts, strict=True)]
        drafted = Counters(*new)
        if not (drafted.steps[HITS] or unlearned.any()):
            return
        steps, tokens = unlearned.tolist()
        message = pb.DraftCounts(hits=int(drafted.steps[HITS]), unlearned_steps=steps, unlearned_tokens=tokens)
        for name, each in drafted._asdict().items():
            if name != "steps":
                setattr(message, name, pack(each.ravel(), "f8" if each.dtype == np.float64 else "u8"))
        if self._protocol.send_draft_counts(message):
            self._sent_counts = counts
