"""The service: assembles, starts and stops all of its parts.

One event loop serves all streams, which keeps the round trip short; merges, snapshots and long prompts run in other
threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import ExitStack
from functools import partial

import grpc
import structlog

from drafter_service.auth.callers import AccessControl
from drafter_service.auth.watched import CHECK_INTERVAL_S
from drafter_service.observability.facts import ModelIdentity, ServiceFacts
from drafter_service.observability.metrics import MetricsEndpoint, facts_from_loop
from drafter_service.observability.process import own_version, resident_bytes
from drafter_service.replication.replicated import Replication
from drafter_service.server.admin import Admin
from drafter_service.server.calls import Refusals, unary_method
from drafter_service.server.disk import LoadError, in_thread
from drafter_service.server.listener import Listener
from drafter_service.server.namespace import Namespace
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError, Namespaces
from drafter_service.server.step_socket import StepSocket
from drafter_service.server.stream import DraftStreams, FollowStreams, draft_method, follow_method
from drafter_service.settings.tree import ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.errors import UserError

GRACE_S = 2.0
"""Time for the last responses when the server stops."""


class DrafterServer:
    """Serves namespaces at the address of a listener."""

    def __init__(self, config: ServiceConfig, listener: Listener) -> None:
        """Assemble the parts; the listener has started. Raises UserError for settings that cannot be used."""
        self._config = config
        self._listener = listener
        self._started_at = time.time()
        self._version = own_version()
        self._replication = Replication(config.log)
        self.namespaces = Namespaces(config, on_loaded=self._replication.add, on_unload=self._replication.remove)
        self._refusals = Refusals()
        self._streams = DraftStreams(self.namespaces, listener.access, config.limits, self._refusals)
        self._followers = FollowStreams(self.namespaces, listener.access, config.limits.streams, self._refusals)
        self._locks = ExitStack()
        """The lock of the snapshot folder."""
        self._step_socket = StepSocket(self._streams, config.limits.streams)
        self._admin = Admin(self.namespaces, self.facts)
        self._housekeeping = Housekeeping(self.namespaces, config, listener.access, self._replication)
        self._metrics: MetricsEndpoint | None = None
        self.summary = ""
        """Drafting statistics in one line; set when the server stops."""

    async def start(self) -> None:
        """Load the configured namespaces, then serve. Raises UserError if a setting cannot be used."""
        try:
            await self._start()
        except BaseException:
            await self._step_socket.stop(0)
            self._locks.close()
            raise

    async def _start(self) -> None:
        store = self.namespaces.store
        if store is not None:
            self._locks.enter_context(store.exclusive_use())
        for name in self._config.namespaces.configured:
            try:
                async with self.namespaces.use(name, ModelIdentity()):
                    pass
            except LoadError:
                continue  # It was logged, and is loaded when it is used.
            except (NamespaceError, MemoryLimitError) as problem:
                raise UserError(f"namespaces: {problem}") from None
        await self._replication.answers()
        self._housekeeping.start()
        steps, access = self._listener.address.steps, self._config.access
        if steps is not None and not access.has_tls:
            await self._step_socket.start(steps, access.socket_permissions)
        if self._config.reports.metrics is not None:
            facts = facts_from_loop(asyncio.get_running_loop(), self.facts)
            self._metrics = MetricsEndpoint(facts, self._config.reports.metrics)
            self._metrics.start()
        await self._listener.serve(self._handlers())

    async def stop(self) -> None:
        """Fail health checks, end every stream after the request in progress, save, and release all resources."""
        await self._listener.refuse()
        self._streams.all.stop()
        self._followers.all.stop()
        await asyncio.gather(self._listener.stop(GRACE_S), self._step_socket.stop(GRACE_S))
        await self._housekeeping.stop()
        if self._metrics is not None:
            # A scrape in progress waits for this loop.
            await asyncio.to_thread(self._metrics.stop)
        self.summary = _summary(self.namespaces.loaded.values())
        await self.namespaces.close()
        await self._replication.stop()
        self._locks.close()

    def facts(self, names: Collection[str] | None = None) -> ServiceFacts:
        """Return the facts about the service, and about all loaded namespaces or the named ones."""
        chosen = [
            namespace for name, namespace in sorted(self.namespaces.loaded.items()) if names is None or name in names
        ]
        set_aside = self.namespaces.set_aside
        return ServiceFacts(
            version=self._version,
            started_at=self._started_at,
            now=time.time(),
            memory_bytes=resident_bytes(),
            namespaces=tuple(namespace.facts() for namespace in chosen),
            refused=self._refusals.total,
            failed_saves=self.namespaces.failed_saves,
            failed_loads=self.namespaces.failed_loads,
            set_aside={name: files for name, files in set_aside.items() if names is None or name in names},
            memory_limit=self._config.namespaces.memory_limit,
            unevictable_bytes=self.namespaces.unevictable_bytes,
            log=self._replication.facts(),
        )

    def _handlers(self) -> dict[str, grpc.RpcMethodHandler]:
        admin, access = self._admin, self._listener.access
        unary = {
            "Observe": (admin.observe, pb.ObserveRequest),
            "Forget": (admin.forget, pb.ForgetRequest),
            "Report": (admin.report, pb.ReportRequest),
            "Snapshot": (admin.snapshot, pb.SnapshotRequest),
            "ListNamespaces": (admin.list_namespaces, pb.ListNamespacesRequest),
            "DropNamespace": (admin.drop_namespace, pb.DropNamespaceRequest),
        }
        handlers = {
            name: unary_method(access, method, request, partial(self._refusals.record, "call refused", method=name))
            for name, (method, request) in unary.items()
        }
        return {**handlers, "Draft": draft_method(self._streams), "Follow": follow_method(self._followers)}


def _summary(namespaces: Iterable[Namespace]) -> str:
    stats = [namespace.stats for namespace in namespaces]
    steps, committed = sum(each.steps for each in stats), sum(each.committed for each in stats)
    return (
        f"stopped; tokens: {committed:,} committed, {sum(each.verified for each in stats):,} drafted, "
        f"{sum(each.accepted for each in stats):,} accepted, {committed / max(1, steps):.2f} per step"
    )


logger = structlog.get_logger(__name__)

SAMPLE_S = 10.0
"""Seconds between two samples of the counters for reports over time."""
IDLE_S = 3600.0
"""Seconds after which a namespace without streams is saved and unloaded, if it can be saved."""


class Housekeeping:
    """Runs the periodic work by monotonic time, so that it continues if the clock jumps."""

    def __init__(
        self,
        namespaces: Namespaces,
        config: ServiceConfig,
        access: AccessControl = None,
        replication: Replication | None = None,
    ) -> None:
        self._namespaces = namespaces
        self._access, self._replication = access, replication
        self._save_s = config.snapshots.interval_s
        self._stopping = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._cancelled: list[asyncio.Task[None]] = []
        """Tasks that `stop` does not wait for."""

    def start(self) -> None:
        """Start the tasks."""
        self._tasks = [
            asyncio.create_task(self._repeat(SAMPLE_S, self._sample)),
            asyncio.create_task(self._repeat(self._save_s, self._save)),
        ]
        if self._access is not None:
            check = partial(in_thread, self._access.check)
            self._cancelled.append(asyncio.create_task(self._repeat(CHECK_INTERVAL_S, check)))
        if self._replication is not None:
            self._cancelled.append(asyncio.create_task(self._repeat(self._save_s, self._follow_log)))

    async def stop(self) -> None:
        """Stop the tasks, after work in progress; not after a check of the callers file, which may never end, nor after
        that of the shared log.
        """
        self._stopping.set()
        for task in self._cancelled:
            task.cancel()
        await asyncio.gather(*self._tasks)

    async def _repeat(self, interval_s: float, act: Callable[[], Awaitable[None]]) -> None:
        while not self._stopping.is_set():
            try:
                async with asyncio.timeout(interval_s):
                    await self._stopping.wait()
            except TimeoutError:
                try:
                    await act()
                except Exception:
                    logger.exception("housekeeping failed; it is tried again")

    async def _sample(self) -> None:
        for namespace in self._namespaces.loaded.values():
            namespace.record_sample(time.time())

    async def _save(self) -> None:
        await self._namespaces.save_changed()
        await self._namespaces.unload_idle(IDLE_S)

    async def _follow_log(self) -> None:
        assert self._replication is not None
        if await self._replication.answers():
            await self._namespaces.follow_log(self._replication.forgets)
