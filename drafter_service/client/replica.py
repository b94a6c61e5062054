"""Draft in the engine's process from a copy of the service's corpus, without a round trip for each step.

The service stays the home of the corpus: it learns, forgets and saves, and sends every change to the copies. What the
engine's requests produce goes to the service when they finish, and comes back to this copy from there, so that the
copy holds nothing that the service does not have. While the service cannot be reached, the copy is used for
`TRUSTED_S`: text that was forgotten meanwhile is not offered after that. Drafts then come from the engine's running
requests alone, until the copy has caught up.

This module imports numba, the rest of the client does not.
"""

from __future__ import annotations

import math
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from random import Random
from typing import IO, TYPE_CHECKING, Any

import grpc
import numpy as np
import structlog

from drafter_service.auth.connector import ClientAccess, Connector
from drafter_service.client.client import CHANNEL_OPTIONS, CLOSE_TIMEOUT_S, NO_TOKENS, DrafterClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from drafter_service.transport.address import Address
from drafter_service.transport.wire import PROTOCOL, WireError, pack, unpack_tokens
from ssd.budget.curve import StepCurve
from ssd.budget.padding import NO_PADDING, Padding
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.ring import SEPARATOR, check_capacity
from ssd.corpus.rollout import Rollout
from ssd.corpus.sections import SnapshotError
from ssd.drafter import SuffixDrafter
from ssd.errors import UserError
from ssd.types import DraftBatch, Progress

if TYPE_CHECKING:
    from drafter_service.observability.facts import ModelIdentity

logger = structlog.get_logger(__name__)

MAX_TOKENS = 64 << 20
"""Largest number of tokens of a copy by default: 1 GB at most. Of a larger corpus it has the newest."""
OWN_TOKENS = 1 << 16
"""Capacity of the corpus that is used while there is no copy; it has no finished text."""
TRUSTED_S = 30.0
"""Largest time in seconds for which a copy is used after the last response that said that it was complete. Forgotten
text is offered no longer."""
SILENCE_S, WATCHED_S = 10.0, 1.0
"""Time without a sign of life after which a call is ended, and how often that is checked, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, LOAD_PAUSE_S = 0.1, 5.0, 120.0
"""The shortest and the longest pause before the next connection, and the longest after snapshots that do not fit, in
seconds; between half of them and all, at random."""
EVERYTHING = pb.Change(forgotten_before=math.inf)
"""Stands for changes that are not known: nothing that the engine's requests have produced is offered to others."""
MAX_FORGOTTEN = 1 << 10
"""Largest number of changes that wait for the engine's next call; after more, `EVERYTHING` is forgotten."""
CHECKED_AT_ONCE = 1 << 20
"""Number of tokens whose ids are checked at a time."""
MANY_NAMES = 1 << 10
ROOM_S = 0.01
"""Pause before a text is added again to an index that has too much to do."""
COUNTED_S = 10.0
"""Interval at which counts of draft tokens are sent."""
WITHDRAWN = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.INVALID_ARGUMENT,
    grpc.StatusCode.PERMISSION_DENIED,
    grpc.StatusCode.UNAUTHENTICATED,
)
"""Status codes after which the copy is deleted: the namespace is, or this client may not read it."""


class Copy:
    """A copy of a namespace's corpus, without threads and connections: a thread passes responses to it."""

    def __init__(
        self,
        request: pb.FollowRequest,
        config: DrafterConfig,
        max_tokens: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """request: with the namespace and the model. config: settings of the drafter. max_tokens: largest capacity."""
        self._request, self._config, self._max_tokens, self._clock = request, config, max_tokens, clock
        self._lock = threading.Lock()
        self._corpus: Corpus | None = None
        """None before the first snapshot, and after the service has withdrawn it."""
        self._names: set[int] = set()
        """Hashes of the names of its texts."""
        self._copy = self._announced = ""
        """The service's names for this copy, and for the one that it sends now."""
        self.position = 0
        """Number of changes that it has."""
        self.snapshots = 0
        """Number of snapshots that were loaded."""
        self._current_at = -np.inf
        """When the copy last had all changes."""
        self._file: IO[bytes] | None = None
        """The parts of the next snapshot so far."""
        self._forgotten: deque[pb.Change] = deque()
        self._is_closed = False

    @property
    def corpus(self) -> Corpus | None:
        """The corpus; None while there is none that can be trusted. Any thread may call it."""
        with self._lock:
            return self._corpus if self._clock() - self._current_at <= TRUSTED_S else None

    def take_forgotten(self) -> list[pb.Change]:
        """Return what was forgotten since the last call, for the thread that drafts."""
        return [self._forgotten.popleft() for _ in range(len(self._forgotten))]

    def request(self) -> pb.FollowRequest:
        """Return the request that begins a stream."""
        request = pb.FollowRequest()
        request.CopyFrom(self._request)
        if self._corpus is not None:
            request.copy, request.position = self._copy, self.position
        return request

    def receive(self, response: pb.FollowResponse, called_at: float) -> None:
        """Process a response of the stream; called_at: when the call was made, by the clock.

        Raises SnapshotError for a snapshot that is damaged, incomplete, or of another match depth, WireError for a
        response that the service does not send, and OSError if a snapshot cannot be stored.
        """
        self._announced = response.copy or self._announced
        if response.snapshot:
            # Without a name: nobody else can open it, and it disappears with the process.
            self._file = self._file or tempfile.TemporaryFile()  # noqa: SIM115
            self._file.write(response.snapshot)
            if not response.HasField("position"):
                return
            self._load(self._file)
        if self._file is not None:
            self.drop_parts()
            if not response.snapshot:
                raise SnapshotError("the snapshot is incomplete")
        if response.changes:
            self._apply(response.changes)
        if response.HasField("position"):
            self._copy, self.position = self._announced, response.position
        if response.is_current:
            with self._lock:
                self._current_at = called_at + max(0.0, response.seconds)

    def drop_parts(self) -> None:
        """Delete the parts of a snapshot, because they are loaded or the stream has ended."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def replace(self, corpus: Corpus | None) -> None:
        """Use another corpus; None: the service has withdrawn it, so its text is erased."""
        names = set() if corpus is None else {*corpus.request_times()}
        with self._lock:
            before, self._corpus, self._names = self._corpus, corpus, names
        if before is None:
            return
        # What was forgotten meanwhile is not known.
        self._forgotten.append(EVERYTHING)
        if corpus is None:
            with suppress(RuntimeError):  # A draft in progress reads it for longer than a change waits.
                before.forget_older_than(-math.inf)
                before.refresh()
        before.close()

    def close(self) -> None:
        """Let the thread that calls `receive` end soon."""
        self._is_closed = True

    def _load(self, file: IO[bytes]) -> None:
        file.flush()
        file.seek(0)
        depth, limit = self._config.match_depth, self._max_tokens
        corpus = snapshot.load(f"/dev/fd/{file.fileno()}", depth=depth, max_capacity=limit).corpus
        self._check_vocabulary(corpus)
        corpus.maintain(self._config.refresh_interval_s)
        self.replace(corpus)
        self.snapshots += 1
        logger.info("replica loaded", tokens=corpus.tokens)

    def _check_vocabulary(self, corpus: Corpus) -> None:
        """Raise SnapshotError for token ids outside the model's vocabulary."""
        state, vocab_size = corpus.state(), self._request.model.vocab_size
        for first in range(state.oldest, state.head, CHECKED_AT_ONCE):
            text = state.read(first, min(first + CHECKED_AT_ONCE, state.head))
            if vocab_size and text[text != SEPARATOR].max(initial=0) >= vocab_size:
                raise SnapshotError(f"it has token ids outside a vocabulary of {vocab_size}")

    def _apply(self, changes: Sequence[pb.Change]) -> None:
        corpus, has_forgotten = self._corpus, False
        if corpus is None:
            raise WireError("changes come before a snapshot")
        for change in changes:
            what = change.WhichOneof("what")
            if what == "finished":
                self._learn(corpus, change.finished)
            elif what is not None:
                has_forgotten = True
                if what == "forgotten":
                    self._names.discard(hash_of(change.forgotten))
                    corpus.forget(change.forgotten)
                else:
                    corpus.forget_older_than(corpus.clock() - change.forgotten_before)
                    corpus.refresh()
                    self._names = {*corpus.request_times()}  # Their text may be learned again.
                self._forgotten.append(change if len(self._forgotten) < MAX_FORGOTTEN else EVERYTHING)
        if has_forgotten:
            corpus.refresh()

    def _learn(self, corpus: Corpus, text: pb.FinishedText) -> None:
        name = hash_of(text.request_id)
        if name in self._names:
            return  # It was learned while the snapshot was written.
        if not math.isfinite(text.time) or text.tag >> 16:
            raise WireError("finished has an impossible time or tag")
        try:
            tokens = unpack_tokens(text.tokens, "finished.tokens", self._request.model.vocab_size)
        except WireError:
            return  # It is of no use for this model.
        while not corpus.append(tokens, text.request_id, text.tag, time=text.time):
            time.sleep(ROOM_S)  # The index is built in another thread.
            if self._is_closed:
                raise WireError("the copy is closed")
        self._names.add(name)
        if len(self._names) > 2 * corpus.requests + MANY_NAMES:  # Most texts have been overwritten.
            self._names = {*corpus.request_times()}


class Follower:
    """The thread that receives what the service sends, and connects again after each loss."""

    def __init__(self, connector: Connector, copy: Copy) -> None:
        self._connector, self._copy = connector, copy
        self._call: Any = None
        self._heard_at = math.inf
        """When the service last sent something; infinite while that is processed, and without a call."""
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"ssd-replica-{run.__name__.strip('_')}", daemon=True)
            for run in (self._run, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Stop, within `CLOSE_TIMEOUT_S`; a load in progress goes on without an effect."""
        self._stopping.set()
        self._copy.close()
        if self._call is not None:
            self._call.cancel()
        self._threads[0].join(CLOSE_TIMEOUT_S)

    def _watch(self) -> None:
        """End a call whose service is silent."""
        while not self._stopping.wait(WATCHED_S):
            if self._call is not None and time.monotonic() - self._heard_at > SILENCE_S:
                self._call.cancel()

    def _run(self) -> None:
        failures, random = 0, Random()
        while not self._stopping.is_set():
            before, reason, longest = self._copy.position, "", LONGEST_PAUSE_S
            try:
                self._receive()
            except grpc.RpcError as problem:
                reason = problem.code().name
                if problem.code() in WITHDRAWN:
                    self._copy.replace(None)
            except SnapshotError as problem:  # Its text names what does not fit, and no text of users.
                reason, longest = str(problem), LOAD_PAUSE_S
                self._copy.replace(None)
            except (UserError, OSError) as problem:  # The copy remains for as long as it can be trusted.
                reason = type(problem).__name__
            except Exception as problem:
                reason = type(problem).__name__
                self._copy.replace(None)
            self._heard_at = math.inf
            self._copy.drop_parts()
            failures = 0 if self._copy.position != before else min(failures + 1, 30)
            if failures == 1 and not self._stopping.is_set():
                logger.warning("replica disconnected", reason=reason)
            self._stopping.wait(random.uniform(0.5, 1) * min(longest, FIRST_PAUSE_S * 2**failures))
        self._copy.replace(None)

    def _receive(self) -> None:
        """Receive until the stream ends."""
        with self._connector.open(CHANNEL_OPTIONS) as channel:
            stub, metadata = drafter_pb2_grpc.DrafterServiceStub(channel), self._connector.metadata()
            called_at = self._heard_at = time.monotonic()
            self._call = stub.Follow(self._copy.request(), metadata=metadata)
            if self._stopping.is_set():
                self._call.cancel()
            for response in self._call:
                self._heard_at = math.inf
                self._copy.receive(response, called_at)
                self._heard_at = time.monotonic()


class ReplicaClient(DrafterClient):
    """A client of the service that drafts in this process; see `DrafterClient`.

    The service gets starts and finishes of sequences, and counts of draft tokens, but no steps.
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
        **settings: Any,
    ) -> None:
        """config: settings of the drafter; its match depth must be the service's, and its capacity is ignored.
        max_tokens: largest number of tokens of the copy; of a larger corpus it has the newest. The others: as in
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
        request = pb.FollowRequest(protocol=PROTOCOL, model=identity, namespace=namespace)
        connector = Connector(Address.parse(address), access or ClientAccess())
        self._counted_at = time.monotonic()
        self._own.maintain(self._local.config.refresh_interval_s)
        self.copy = Copy(request, self._local.config, max_tokens)
        self._follower = Follower(connector, self.copy)
        try:
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
        may_learn = self.welcome is not None and self.welcome.may_learn
        self._local.start(sequence_id, prompt, learn=learn and may_learn, **options)
        try:
            super().start(sequence_id, prompt, learn=learn, **options)
        except BaseException:
            self._local.finish(sequence_id, NO_TOKENS, learn=False)
            raise

    def begin_draft(self, progress: Progress) -> Callable[[], DraftBatch]:
        """Draft at once, and return a function that returns the drafts."""
        self._update()
        drafts = self._local.draft(progress)
        return lambda: drafts

    def draft_after(self, progress: Progress) -> DraftBatch:
        """See `SuffixDrafter.draft_after`."""
        return self._local.draft_after(progress)

    def propose(self, context: Sequence[int] | np.ndarray, max_draft: int | None = None) -> DraftBatch:
        """See `DrafterClient.propose`."""
        self._update()
        return self._local.propose(context, max_draft)

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, steps: int = 1, learn: bool = True
    ) -> None:
        """See `DrafterClient.finish`."""
        output = np.concatenate([self._local.output_of(sequence_id), tokens])
        all_steps = self._local.steps_of(sequence_id) + (steps if len(tokens) else 0)
        self._local.finish(sequence_id, tokens, verified=verified, steps=steps, learn=learn)
        super().finish(sequence_id, output, steps=max(1, all_steps), learn=learn)
        if time.monotonic() - self._counted_at > COUNTED_S:
            self._send_counts()

    def forget(self, request_id: str) -> None:
        """See `DrafterClient.forget`."""
        self._local.forget(request_id)
        self._local.corpus.refresh()
        super().forget(request_id)

    def close(self) -> None:
        """See `DrafterClient.close`."""
        if self._is_fork:
            super().close()
            return
        self._send_counts()
        super().close()
        self._close_local()

    def _close_local(self) -> None:
        """Release the drafter and the copy."""
        self._local.close()
        self._follower.close()
        self._own.close()

    def _update(self) -> None:
        """Use the newest copy, and forget what was forgotten."""
        self._check_process()
        corpus, changes = self.copy.corpus or self._own, self.copy.take_forgotten()
        if changes or (corpus is not self._local.corpus and corpus is not self._own):
            # Nothing of the time without a copy is used again: it may have been forgotten.
            self._own.fallback.erase(self._own.clock())
        if corpus is not self._local.corpus:
            self._local.use_corpus(corpus)
        for change in changes:
            if change.WhichOneof("what") == "forgotten":
                self._local.forget_own(change.forgotten)
            elif change is EVERYTHING or change.forgotten_before == math.inf:
                self._local.withdraw_all()
            else:
                self._local.end_sessions_before(change.forgotten_before)

    def _send_counts(self) -> None:
        """Send the counts of draft tokens since the last call, if there is a connection."""
        self._counted_at = time.monotonic()
        stats = self._local.stats
        message = pb.DraftCounts(hits=stats.hits)
        for name, counts in stats.counters._asdict().items():
            if name != "steps":
                setattr(message, name, pack(counts.ravel(), "f8" if counts.dtype == np.float64 else "u8"))
        if stats.hits and self.is_connected:
            self._queue(lambda: self._protocol.send_draft_counts(message))
            for counts in stats.counters:
                counts[:] = 0
