"""Copies of the service's corpora in an engine's process: what the service sends becomes a corpus.

A copy that has lost its connection is used for `TRUSTED_S`, so that forgotten text is not offered for longer.
"""

from __future__ import annotations

import logging
import math
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from random import Random
from typing import IO, Any

import grpc

from drafter_service.auth.connector import Connector
from drafter_service.client.client import CHANNEL_OPTIONS, CLOSE_TIMEOUT_S
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from drafter_service.transport.wire import WireError, unpack_tokens
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import hash_of
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError

logger = logging.getLogger(__name__)

TRUSTED_S = 30.0
"""Largest time in seconds for which a copy is used after the last response that said that it was complete. Forgotten
text is offered no longer."""
SILENCE_S, WATCHED_S = 10.0, 1.0
"""Time without a sign of life after which a call is ended, and how often that is checked, in seconds."""
FIRST_PAUSE_S, LONGEST_PAUSE_S, LOAD_PAUSE_S = 0.1, 5.0, 120.0
"""The shortest pause before the next connection, the longest while the service is away, and the longest if it refuses
or its snapshot cannot be used, in seconds; between half of them and all, at random."""
EVERYTHING = pb.Change(forgotten_before=math.inf)
"""Stands for changes that are not known: nothing that the engine's requests have produced is offered to others."""
MAX_FORGOTTEN = 1 << 10
"""Largest number of changes that wait for the engine's next call; after more, `EVERYTHING` is forgotten."""
CHECKED_AT_ONCE = 1 << 20
"""Number of tokens whose ids are checked at a time."""
MANY_NAMES = 1 << 10
ROOM_S = 0.01
"""Pause before a text is added again to an index that has too much to do."""
AWAY = (
    grpc.StatusCode.ABORTED,
    grpc.StatusCode.CANCELLED,
    grpc.StatusCode.DEADLINE_EXCEEDED,
    grpc.StatusCode.UNAVAILABLE,
)
"""Status codes after which the service may soon send a copy again."""
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
        self._withheld: set[int] = set()
        """Hashes of names that this client forgets; their texts are not learned until the service's change arrives."""
        self._forgot_at = -math.inf
        """When `forgetting` last ended; infinite until it ends."""
        self._copy = self._announced = ""
        """The service's names for this copy, and for the one that it sends now."""
        self.position = 0
        """Number of changes that it has."""
        self.snapshots = 0
        """Number of snapshots that were loaded."""
        self._current_at = -math.inf
        """When the corpus last had all changes."""
        self._file: IO[bytes] | None = None
        """The parts of the next snapshot so far."""
        self.libraries: list[str] = []
        """Namespaces that the service drafts from, too."""
        self._forgotten: list[pb.Change] = []
        self._is_closed = False

    def of_library(self, name: str) -> Copy:
        """Return the copy of a library before its first snapshot."""
        request = pb.FollowRequest()
        request.CopyFrom(self._request)
        request.namespace = name
        return Copy(request, self._config, self._max_tokens, self._clock)

    @property
    def corpus(self) -> Corpus | None:
        """The corpus; None while there is none that can be trusted. Any thread may call it."""
        with self._lock:
            return self._corpus if self._clock() - self._current_at <= TRUSTED_S else None

    def take(self) -> tuple[Corpus | None, list[pb.Change]]:
        """Return `corpus`, and what was forgotten since the last call, for the thread that drafts."""
        with self._lock:
            forgotten = self._forgotten
            if forgotten:
                self._forgotten = []
            return self._corpus if self._clock() - self._current_at <= TRUSTED_S else None, forgotten

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
        if response.namespace:
            self.libraries = list(response.libraries)
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
                moment = called_at + max(0.0, response.seconds)
                # A new snapshot may be older than a call of `forgetting`.
                if moment >= self._forgot_at or self._current_at > -math.inf:
                    self._current_at = moment

    @contextmanager
    def forgetting(self, request_id: str) -> Iterator[None]:
        """Erase the texts of a name, and offer none from the end of the block on, in which the service forgets them.

        They may still arrive after it, before the change that forgets them. If the block raises, they are learned.
        """
        name = hash_of(request_id)
        with self._lock:
            self._forgot_at = math.inf
            if (corpus := self._corpus) is not None:
                self._withheld.add(name)
        try:
            if corpus is not None:
                corpus.forget(request_id)
                corpus.refresh()
            yield
        except BaseException:
            self._withheld.discard(name)
            raise
        finally:
            self._forgot_at = self._clock()

    def drop_parts(self) -> None:
        """Delete the parts of a snapshot, because they are loaded or the stream has ended."""
        file, self._file = self._file, None
        if file is not None:
            with suppress(OSError):  # It writes what is buffered first.
                file.close()

    def replace(self, corpus: Corpus | None) -> None:
        """Use another corpus; None: the service has withdrawn it, so its text is erased."""
        names = set() if corpus is None else {*corpus.request_times()}
        with self._lock:
            before, self._corpus, self._names = self._corpus, corpus, names
            self._withheld, self._current_at = set(), -math.inf
        if before is None:
            return
        # What was forgotten meanwhile is not known.
        self._add_forgotten(EVERYTHING)
        try:
            if corpus is None:
                before.forget_older_than(-math.inf)
                before.refresh()
        except Exception as problem:  # A draft in progress reads it for too long, or memory is short.
            logger.warning("the text of a withdrawn copy was not erased: %s", type(problem).__name__)
        finally:
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
        if self._corpus is not None:  # The service has not learned from the drafts that were made here.
            for new, learned in zip(corpus.learned, self._corpus.learned, strict=True):
                new[:] = learned
        corpus.maintain(self._config.refresh_interval_s)
        self.replace(corpus)
        self.snapshots += 1
        logger.info("replica loaded: %d tokens", corpus.tokens)

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
                    self._withheld.discard(hash_of(change.forgotten))
                    corpus.forget(change.forgotten)
                else:
                    corpus.forget_older_than(corpus.clock() - change.forgotten_before)
                    corpus.refresh()
                    self._names = {*corpus.request_times()}  # Their text may be learned again.
                self._add_forgotten(change)
        if has_forgotten:
            corpus.refresh()

    def _add_forgotten(self, change: pb.Change) -> None:
        with self._lock:
            is_full = len(self._forgotten) >= MAX_FORGOTTEN
            self._forgotten = [EVERYTHING] if is_full else [*self._forgotten, change]

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
        while True:
            with self._lock:  # `forgetting` erases what is appended before it adds the name.
                if name in self._withheld:
                    return
                if corpus.append(tokens, text.request_id, text.tag, time=text.time):
                    break
            time.sleep(ROOM_S)  # The index is built in another thread.
            if self._is_closed:
                raise WireError("the copy is closed")
        self._names.add(name)
        if len(self._names) > 2 * corpus.requests + MANY_NAMES:  # Most texts have been overwritten.
            self._names = {*corpus.request_times()}


class Follower:
    """The thread that receives what the service sends, and connects again after each loss."""

    def __init__(self, connector: Connector, copy: Copy, on_lost: Callable[[str], None]) -> None:
        """on_lost: called with the reason why there is no copy, unless the service is only away."""
        self._connector, self.copy, self._on_lost = connector, copy, on_lost
        self._call: Any = None
        self._heard_at = math.inf
        """When the service last sent something; infinite while that is processed, and without a call."""
        self._failures, self._reported = 0, ""
        """Number of streams, and the last reason that was reported, since the service last sent a position."""
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=run, name=f"ssd-replica-{run.__name__.strip('_')}", daemon=True)
            for run in (self._run, self._watch)
        ]
        for thread in self._threads:
            thread.start()

    def of_library(self, name: str) -> Follower:
        """Return a follower of a library, with the same settings."""
        return Follower(self._connector, self.copy.of_library(name), self._on_lost)

    def close(self) -> None:
        """Stop, within `CLOSE_TIMEOUT_S`; a load in progress goes on without an effect."""
        self._stopping.set()
        self.copy.close()
        if self._call is not None:
            self._call.cancel()
        self._threads[0].join(CLOSE_TIMEOUT_S)

    def _watch(self) -> None:
        """End a call whose service is silent."""
        while not self._stopping.wait(WATCHED_S):
            if self._call is not None and time.monotonic() - self._heard_at > SILENCE_S:
                self._call.cancel()

    def _run(self) -> None:
        random = Random()
        while not self._stopping.is_set():
            is_withdrawn, reason, longest = False, "", LOAD_PAUSE_S
            try:
                self._receive()
            except grpc.RpcError as problem:
                is_withdrawn = problem.code() in WITHDRAWN
                if is_withdrawn or problem.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                    reason = problem.details() or problem.code().name
                elif problem.code() is grpc.StatusCode.UNIMPLEMENTED:
                    reason = 'it is older and sends no copies; update it, or set "drafting" to "sidecar"'
                if problem.code() in AWAY:
                    longest = LONGEST_PAUSE_S
            except SnapshotError as problem:  # Its text names what does not fit, and no text of users.
                is_withdrawn, reason = True, str(problem)
            except OSError as problem:  # The copy remains for as long as it can be trusted.
                reason = f"the snapshot cannot be stored in {tempfile.gettempdir()} ({problem.strerror})"
            except UserError:
                longest = LONGEST_PAUSE_S
            except Exception as problem:
                is_withdrawn, reason = True, type(problem).__name__
            self._heard_at = math.inf
            try:
                self.copy.drop_parts()
                if is_withdrawn:
                    self.copy.replace(None)
            except Exception as problem:
                reason = type(problem).__name__
            if reason not in ("", self._reported) and not self._stopping.is_set():
                self._reported = reason
                with suppress(Exception):
                    self._on_lost(f"no copy of the corpus from the drafter at {self._connector.address.text}: {reason}")
            self._stopping.wait(random.uniform(0.5, 1) * min(longest, FIRST_PAUSE_S * 2**self._failures))
            self._failures = min(self._failures + 1, 30)
        self.copy.replace(None)

    def _receive(self) -> None:
        """Receive until the stream ends."""
        with self._connector.open(CHANNEL_OPTIONS) as channel:
            stub, metadata = drafter_pb2_grpc.DrafterServiceStub(channel), self._connector.metadata()
            called_at = self._heard_at = time.monotonic()
            self._call = stub.Follow(self.copy.request(), metadata=metadata)
            if self._stopping.is_set():
                self._call.cancel()
            for response in self._call:
                self._heard_at = math.inf
                self.copy.receive(response, called_at)
                self._heard_at = time.monotonic()
                if response.HasField("position"):
                    self._failures, self._reported = 0, ""
