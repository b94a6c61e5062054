"""A namespace: an isolated corpus with its learned probabilities, counters and streams."""

from __future__ import annotations

import asyncio
import math
import secrets
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple, TypeVar, cast

import numpy as np

from drafter_service.observability.facts import (
    MAX_ENGINES,
    OTHER_ENGINES,
    Engine,
    EngineUse,
    History,
    Latency,
    ModelIdentity,
    NamespaceFacts,
)
from drafter_service.observability.report.schema import ClientTotals, CopyReport, CorpusReport
from drafter_service.replication.events import Event, Kind
from drafter_service.server.feed import CopyStream, Feed
from drafter_service.server.shadow import ShadowDrafter
from drafter_service.server.store import Description
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import pack
from ssd.budget.cost_profile import CostProfile
from ssd.budget.curve import StepCurve
from ssd.budget.padding import NO_PADDING, Padding
from ssd.budget.totals import BudgetTotals
from ssd.config import DrafterConfig, DraftShape
from ssd.corpus.corpus import Corpus
from ssd.corpus.requests import Forget, hash_of
from ssd.corpus.rollout import NO_TAG
from ssd.drafter import SuffixDrafter
from ssd.stats import Stats

MAX_FORGOTTEN = 1 << 16
"""Maximum number of names of which it is known when they were forgotten; 13 MB."""
MIN_NAMES = 1 << 17
"""Number of request names that are remembered at least, so that no request is learned twice, in 16 MB. Those of all
requests in the corpus are remembered, however many they are."""

POLL_S = 0.005
"""Interval at which `wait_for_room` reads the number of waiting tokens."""


D = TypeVar("D", bound=SuffixDrafter)


class IdentityError(ValueError):
    """The client's model differs from the namespace's."""


class ClosedError(RuntimeError):
    """The namespace was unloaded."""


class UnpublishedError(RuntimeError):
    """Text was forgotten here, and the shared log does not have the event that tells the other sidecars."""

    def __init__(self, done: str) -> None:
        super().__init__(
            f"{done}, but not by the other sidecars: the shared log did not take the event, which waits in memory; "
            "repeat the command when the log is back"
        )


async def _is_published() -> bool:
    return True


class Forgotten(NamedTuple):
    """When a name was forgotten."""

    told_at: float
    """When this or another sidecar was told to, in seconds since 1970."""
    here_at: float
    """When it was forgotten here, by `time.monotonic`; after a restart, when the namespace was loaded."""


@dataclass(eq=False)
class StreamHandle:
    """Handle of one engine's stream, by which it can be ended. Made by the task that serves it."""

    task: asyncio.Task[object] = field(default_factory=lambda: cast("asyncio.Task[object]", asyncio.current_task()))
    is_sending: bool = False
    """Whether gRPC is sending a response: a stream that is cancelled meanwhile ends without a status, and hangs."""
    is_over: bool = False
    namespace: Namespace | None = None
    """The namespace that it uses; None before the handshake."""

    def end(self) -> None:
        """End the stream, after the response in progress."""
        self.is_over = True
        if not self.is_sending:
            self.task.cancel()


class Namespace:
    """One corpus and the drafters that use it. Used by the event loop alone."""

    def __init__(
        self,
        name: str,
        model: ModelIdentity,
        config: DrafterConfig,
        corpus: Corpus,
        *,
        learned: dict[int, float] | None = None,
        stats: Stats | None = None,
        max_waiting: int = Limits.waiting_tokens,
        profile: CostProfile | None = None,
    ) -> None:
        """Make a namespace, and refresh `corpus` in the background until it is closed.

        learned: the corpus's `request_times`, if another thread has read them, which takes 0.1 s for 400,000 requests.
        max_waiting: number of learned tokens that may wait to become draftable before `wait_for_room` waits. profile:
        durations of the engines' steps until they report their own; None: a guess.
        """
        self.name = name
        self.model = model
        self.config = config
        self.corpus = corpus
        self.libraries: list[str] = []
        """Names of the namespaces that `read_from` was called with."""
        self.engines = Engines()
        self._earlier = stats or Stats()
        """Statistics of the snapshot, and of streams without an engine."""
        self.history = History()
        self.clients = ClientTotals()
        self.shadow = Stats()
        """What withheld drafts would have gained."""
        self.draft_latency = Latency()
        self.merge_latency = Latency()
        self.duplicates = 0
        self._learned_before = 0
        """Number of tokens that were learned before the snapshot."""
        self.drafters: set[SuffixDrafter] = set()
        self._ended = BudgetTotals()
        """Totals of the token budgets of streams and calls that have ended."""
        self.streams: set[StreamHandle] = set()
        self.followers: dict[StreamHandle, CopyStream] = {}
        """Streams to clients that draft from a copy, by their handles."""
        self.active_calls = 0
        """Number of calls in progress that use the namespace."""
        self.is_closed = False
        """Whether it was unloaded."""
        self.last_used = time.monotonic()
        self.restored_position: str | None = None
        """Position up to which the shared log had been read when the restored snapshot was saved."""
        self.log_position: Callable[[], str] | None = None
        """Function that returns the position up to which the shared log has been read; None without a shared log."""
        self.has_read_log: Callable[[], bool] = lambda: True
        """Function that returns whether the shared log has been read to its end."""
        self.feed = Feed()
        """Changes for clients that draft from a copy."""
        self.publish: Callable[[Event], None] = lambda _: None
        """Function that writes an event to the shared log."""
        self.is_published: Callable[[], Awaitable[bool]] = _is_published
        """Function that returns whether the shared log has all events; it waits a few seconds for that."""
        self.has_unpublished: Callable[[], bool] = lambda: False
        """Function that returns whether events wait until the shared log can be reached."""
        self._learned = corpus.request_times() if learned is None else learned
        """Hashes of names, with the times when they were learned."""
        self._forgotten: dict[int, Forgotten] = {}
        """The names that were forgotten last, by their hashes."""
        self._forgotten_before = -math.inf
        """Time before which everything was forgotten, in seconds since 1970."""
        # Texts that cannot wait have the other half of what the corpus allows.
        self._max_waiting = min(max_waiting, corpus.max_waiting // 2)
        self._profile = profile
        self.saved_version = self.version
        """The `version` that the last snapshot contains."""
        corpus.times.on_refresh = self.merge_latency.record
        corpus.maintain(config.refresh_interval_s)

    def describe(self) -> Description:
        """Return a copy of the data that is stored beside the corpus, for another thread to write."""
        return Description(
            name=self.name,
            model=self.model,
            tokens=self.corpus.tokens,
            clients=self.clients.model_copy(),
            duplicates=self.duplicates,
            learned_tokens=self.learned_tokens,
            log_position=self.log_position() if self.log_position else self.restored_position,
            history=[tuple(sample) for sample in self.history.samples],
            forgotten={name: forgotten.told_at for name, forgotten in self._forgotten.items()},
            forgotten_before=None if math.isinf(self._forgotten_before) else self._forgotten_before,
        )

    def restore(self, stored: Description) -> None:
        """Continue with what `describe` returned."""
        self.model, self.clients, self.duplicates = stored.model, stored.clients, stored.duplicates
        self.restored_position = stored.log_position
        self._learned_before = stored.learned_tokens or self.corpus.tokens
        for sample in stored.samples():
            self.history.record(sample)
        # `here_at` is not when they were forgotten: the clock may have been set since.
        names, now = list(stored.forgotten.items())[-MAX_FORGOTTEN:], time.monotonic()
        self._forgotten = {name: Forgotten(told_at, now) for name, told_at in names}
        if stored.forgotten_before is not None:
            self._forgotten_before = stored.forgotten_before

    def read_from(self, libraries: Sequence[Namespace]) -> None:
        """Draft from these namespaces, too, and from no others. Raises IdentityError for another tokenizer."""
        for library in libraries:
            library.check_identity(self.model)
        self.libraries = [library.name for library in libraries]
        self.corpus.read_from(*(library.corpus for library in libraries))

    def check_identity(self, model: ModelIdentity) -> None:
        """Raise IdentityError if token ids of a model have other meanings."""
        own = self.model
        if own.tokenizer and model.tokenizer and not own.has_tokenizer_of(model):
            raise IdentityError(f"namespace {self.name!r} belongs to another tokenizer; choose another namespace")
        if own.vocab_size and model.vocab_size and own.vocab_size != model.vocab_size:
            raise IdentityError(
                f"namespace {self.name!r} has a vocabulary of {own.vocab_size} tokens, not "
                f"{model.vocab_size}; choose another namespace"
            )

    def adopt(self, model: ModelIdentity) -> None:
        """Complete the model's identity with a client's. Raises IdentityError if they contradict each other."""
        self.check_identity(model)
        self.model = ModelIdentity(**{name: value or getattr(model, name) for name, value in vars(self.model).items()})
        self.last_used = time.monotonic()

    @property
    def stats(self) -> Stats:
        """The sum of all statistics, without those of shadow mode."""
        total = Stats()
        total.add(self._earlier)
        self.engines.add_to(total)
        return total

    def new_drafter(
        self, draft_shape: DraftShape | None = None, padding: Padding = NO_PADDING, stats: Stats | None = None
    ) -> SuffixDrafter:
        """Return a drafter for one stream or call.

        draft_shape: shape of its drafts; None: as configured. padding: shapes that its engine pads steps to. stats:
        counters of its engine; None: those of the namespace.
        """
        return self._new_drafter(SuffixDrafter, draft_shape, padding, stats or self._earlier)

    def new_shadow_drafter(self, draft_shape: DraftShape | None = None, padding: Padding = NO_PADDING) -> ShadowDrafter:
        """Return a drafter whose drafts are withheld, and counted in `shadow`; see `new_drafter`."""
        return self._new_drafter(ShadowDrafter, draft_shape, padding, self.shadow)

    def _new_drafter(self, kind: type[D], draft_shape: DraftShape | None, padding: Padding, stats: Stats) -> D:
        config = self.config if draft_shape is None else replace(self.config, draft_shape=draft_shape)
        curve = self._new_curve(padding)
        drafter = kind(config, corpus=self.corpus, stats=stats, remember=self.learn, curve=curve, sorts_in_thread=True)
        self.drafters.add(drafter)
        return drafter

    def _new_curve(self, padding: Padding) -> StepCurve:
        """Return the durations of the steps of an engine that has reported none; padding: its shapes."""
        if self.config.cost is not None:
            return StepCurve.constant(self.config.cost, padding)
        if self._profile is not None:
            return self._profile.curve(padding)
        return StepCurve.unknown(padding)

    def release(self, drafter: SuffixDrafter) -> None:
        """Close a drafter whose stream or call has ended."""
        if drafter in self.drafters:
            self.drafters.remove(drafter)
            self._ended.add(_budget_totals(drafter))
        drafter.close()

    def has_learned(self, request_id: str | None) -> bool:
        """Return whether a text of this name was learned; False for None."""
        return request_id is not None and hash_of(request_id) in self._learned

    @property
    def newest_time(self) -> float:
        """Newest time of a text that was learned, in seconds since 1970; -inf if there is none."""
        return max(self._learned.values(), default=-math.inf)

    def was_forgotten(self, request_id: str, age_s: float) -> bool:
        """Return whether a name was forgotten in the last `age_s` seconds."""
        forgotten = self._forgotten.get(hash_of(request_id))
        return forgotten is not None and forgotten.here_at >= time.monotonic() - age_s

    def learn(
        self,
        tokens: np.ndarray,
        request_id: str | None,
        tag: int = NO_TAG,
        *,
        finished_at: float | None = None,
        is_from_log: bool = False,
    ) -> bool:
        """Learn a finished text, uint32 [n]; return False if its name was learned before, or it is dropped.

        tag: that of a rollout, see `Rollout.tag`. finished_at: time, in seconds since 1970, from which its age counts;
        None: now. is_from_log: whether it was read from the shared log, so that it is not written there, nor counted if
        it was learned before, and not learned if it finished before it was forgotten: what forgets it may have been
        written first.
        """
        finished_at = self.corpus.clock() if finished_at is None else finished_at
        if is_from_log and self._is_covered(request_id, finished_at):
            return False
        if self.has_learned(request_id):
            self.duplicates += not is_from_log
            return False
        # By its name, clients that draft from a copy and readers of the log tell a text that they get twice from two
        # equal texts.
        name = request_id or secrets.token_hex(8)
        is_learned = self.corpus.append(tokens, name, tag, time=finished_at)
        if is_learned:
            self._learned[hash_of(name)] = finished_at
            kept = max(MIN_NAMES, self.corpus.requests + self.corpus.waiting_requests)
            if len(self._learned) > kept + MIN_NAMES // 8:
                for oldest in list(islice(self._learned, MIN_NAMES // 8)):
                    del self._learned[oldest]
            text = pb.FinishedText(tokens=pack(tokens, "u4"), request_id=name, time=finished_at, tag=tag)
            self.feed.add(pb.Change(finished=text))
        if not is_from_log:
            self.publish(Event(Kind.FINISHED, finished_at, name, tokens, tag))
        return is_learned

    def has_forgotten(self, event: Event) -> bool:
        """Return whether an event that forgets text was applied here, or is older than the text of that name."""
        if event.kind is Kind.FORGOTTEN:
            learned_at = self._learned.get(hash_of(event.request), -math.inf)
            return learned_at > event.time or self._is_covered(event.request, event.time)
        return event.time <= self._forgotten_before

    def _is_covered(self, request_id: str | None, finished_at: float) -> bool:
        """Return whether a text that finished at a time has been forgotten since."""
        forgotten = self._forgotten.get(hash_of(request_id))
        return finished_at < self._forgotten_before or (forgotten is not None and finished_at <= forgotten.told_at)

    async def wait_for_room(self) -> None:
        """Return once at most `max_waiting` learned tokens, or half of what the corpus allows, are not draftable yet.

        Raises ClosedError.
        """
        while not self.is_closed:
            if self.corpus.waiting <= self._max_waiting:
                return
            await asyncio.sleep(POLL_S)
        self.check_is_open()

    def check_is_open(self) -> None:
        """Raise ClosedError if the namespace was unloaded."""
        if self.is_closed:
            raise ClosedError(f"namespace {self.name!r} was dropped")

    async def refresh(self) -> None:
        """Return once no draft can contain forgotten text."""
        await asyncio.to_thread(self.corpus.refresh)

    def forget(self, request_id: str, *, logged_at: float | None = None) -> Forget:
        """Forget the text of a name, including that of running sequences; effective, and counted, after `refresh`.

        logged_at: when another sidecar was told to, in seconds since 1970, if that was read from the shared log, so
        that it is not written there; None: this one is told to, now. A text that finished later is forgotten, too: it
        ran at that time, here or at another sidecar, or the clocks differ. Then the log has to have the later time.
        """
        name = hash_of(request_id)
        told_at = max(self.corpus.clock() if logged_at is None else logged_at, self._learned.pop(name, -math.inf))
        if told_at != logged_at:
            self.publish(Event(Kind.FORGOTTEN, told_at, request_id))
        before = self._forgotten.pop(name, None)
        told_at = told_at if before is None else max(told_at, before.told_at)
        self._forgotten[name] = Forgotten(told_at, time.monotonic())
        if len(self._forgotten) > MAX_FORGOTTEN:
            del self._forgotten[next(iter(self._forgotten))]
        running = sum(drafter.forget_own(request_id) for drafter in self.drafters)
        command = self.corpus.forget(request_id)
        self.feed.forget(pb.Change(forgotten=request_id), command)
        command.requests += running
        return command

    def forget_before(self, moment: float, *, logged_at: float | None = None) -> Forget:
        """Forget text learned before a time, in seconds since 1970; math.inf: everything. See `forget`."""
        told = min(moment, self.corpus.clock() if logged_at is None else logged_at)
        if logged_at is None:
            self.publish(Event(Kind.FORGOTTEN_BEFORE if moment < math.inf else Kind.DROPPED, told))
        self._forgotten_before = max(self._forgotten_before, told)
        self._learned = {name: time for name, time in self._learned.items() if time >= moment}
        for drafter in self.drafters:
            drafter.end_sessions_before(moment)
        command = self.corpus.forget_older_than(self.corpus.clock() - moment)
        self.feed.forget(pb.Change(forgotten_before=moment), command)
        return command

    @property
    def sequences(self) -> int:
        """Number of running sequences."""
        return sum(len(drafter.running) for drafter in self.drafters)

    @property
    def is_idle(self) -> bool:
        """Whether no stream and no call uses the namespace."""
        return not self.drafters and not self.active_calls

    @property
    def is_changed(self) -> bool:
        """Whether there is anything to save."""
        return self.saved_version != self.version

    @property
    def version(self) -> tuple[int, int]:
        """A pair of counts that changes with what is saved."""
        changes = self.corpus.appended + self.corpus.times.forgotten + self.feed.end
        return changes, self._earlier.steps + self.engines.steps

    @property
    def budget_totals(self) -> BudgetTotals:
        """Totals of the token budgets of all engines, since the namespace was loaded."""
        totals = BudgetTotals()
        for part in (self._ended, *map(_budget_totals, self.drafters)):
            totals.add(part)
        return totals

    @property
    def learned_tokens(self) -> int:
        """Number of tokens that were ever learned."""
        return self._learned_before + self.corpus.appended

    @property
    def memory_bytes(self) -> int:
        """Memory of the corpus, the learned probabilities, the running sequences and the changes that are kept."""
        return self.corpus.nbytes + self.feed.nbytes + sum(drafter.own_bytes for drafter in self.drafters)

    def record_sample(self, now: float) -> None:
        """Add the totals at a time, in seconds since 1970, to the history."""
        self.history.record(self.facts().sample(now))

    def facts(self) -> NamespaceFacts:
        """Return the facts for reports and metrics."""
        corpus, times = self.corpus, self.corpus.times
        return NamespaceFacts(
            name=self.name,
            model=self.model,
            stats=self.stats,
            history=self.history,
            corpus=CorpusReport(
                capacity_tokens=corpus.capacity,
                tokens=corpus.tokens,
                requests=corpus.requests,
                learned_tokens=self.learned_tokens,
                waiting_tokens=max(0, corpus.waiting),
                merges=times.merges,
                base_merges=times.base_merges,
                full_builds=times.full_builds,
                forgotten_requests=times.forgotten,
                dropped_requests=times.dropped,
            ),
            memory_bytes=self.memory_bytes,
            copies=tuple(self._copies()),
            libraries=tuple(self.libraries),
            streams=len(self.streams),
            sequences=self.sequences,
            draft_latency=self.draft_latency,
            merge_latency=self.merge_latency,
            clients=self.clients,
            shadow=self.shadow,
            duplicates=self.duplicates,
            uses=dict(self.engines.uses),
            budget=self.budget_totals,
        )

    def _copies(self) -> Iterator[CopyReport]:
        for stream in self.followers.values():
            yield CopyReport(
                engine=stream.engine,
                tokens=min(self.corpus.tokens, stream.max_tokens),
                missing_changes=self.feed.end - (stream.position if stream.copy == self.feed.copy else 0),
            )

    def close(self) -> None:
        """Drop all running sequences. The caller closes the corpus afterwards, in a thread that may block."""
        self.is_closed = True
        for drafter in list(self.drafters):
            self.release(drafter)


def _budget_totals(drafter: SuffixDrafter) -> BudgetTotals:
    """Return the totals of a drafter's token budget, without what it chose among drafts that are withheld anyway."""
    totals = drafter.budget.totals
    return replace(totals, withheld=0) if isinstance(drafter, ShadowDrafter) else totals


class Engines:
    """A limited number of engines. Used by the event loop alone."""

    def __init__(self) -> None:
        self.uses: dict[Engine, EngineUse] = {}
        self._dropped = Stats()
        """Statistics of the engines that are not in the table any more."""

    def connect(self, engine: Engine) -> EngineUse:
        """Count a stream of an engine, and return the counters for it.

        Beyond `MAX_ENGINES` the engine that has been disconnected for longest is dropped from the table; if all are
        connected, the new one is counted as `OTHER_ENGINES`.
        """
        if engine not in self.uses and len(self.uses) >= MAX_ENGINES and not self._drop_one():
            engine = OTHER_ENGINES
        use = self.uses.setdefault(engine, EngineUse(Stats()))
        use.streams += 1
        return use

    @staticmethod
    def disconnect(use: EngineUse) -> None:
        """Count the end of a stream."""
        use.streams -= 1
        use.disconnected_at = time.monotonic()

    @property
    def steps(self) -> int:
        """Sequence steps of all engines."""
        return self._dropped.steps + sum(use.stats.steps for use in self.uses.values())

    def add_to(self, stats: Stats) -> None:
        """Add the statistics of all engines to `stats`."""
        stats.add(self._dropped)
        for use in self.uses.values():
            stats.add(use.stats)

    def _drop_one(self) -> bool:
        """Drop the engine that has been disconnected for longest; return whether there is one."""
        idle = [engine for engine, use in self.uses.items() if not use.streams]
        if not idle:
            return False
        oldest = min(idle, key=lambda engine: self.uses[engine].disconnected_at)
        self._dropped.add(self.uses.pop(oldest).stats)
        return True
