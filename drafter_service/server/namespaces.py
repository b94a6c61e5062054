"""All namespaces of a service: created or restored on first use, saved, unloaded when idle, within a memory limit."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar
from weakref import WeakValueDictionary

import structlog

from drafter_service.auth.callers import Caller, Right
from drafter_service.observability.facts import ModelIdentity
from drafter_service.replication.events import Event, Kind
from drafter_service.server.disk import DiskThreads, LoadError, finished
from drafter_service.server.namespace import ClosedError, IdentityError, Namespace, UnpublishedError
from drafter_service.server.naming import KnownNamespace, find_default, find_other
from drafter_service.server.store import NAME, Description, Store, Stored
from drafter_service.settings.tree import ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError
from ssd.stats import Stats

logger = structlog.get_logger(__name__)

BYTES_PER_TOKEN = 15
"""Peak memory per token of capacity, in bytes, during a merge."""
MIN_BYTES = 25_000_000
"""Memory of a namespace besides its tokens, in bytes: learned probabilities, running text, buffers."""

DISK_LIMIT_S, DISK_BYTES_PER_S = 30.0, 20e6
"""Limit of the time that a caller waits for a file: a number of seconds, plus the file's size divided by a rate. Disks
that answer are faster."""
RETRY_S = 5.0
"""Time in seconds after which a namespace that could not be loaded is tried again. Each attempt may unload another."""

READ_LIMIT_S, READ_POLL_S = 60.0, 0.05
"""Limit of the time in which a namespace that `follow_log` has loaded reads the log, and interval at which it is asked
whether it has. The next attempt goes on where it stopped."""

Locks = WeakValueDictionary[str, asyncio.Lock]
T = TypeVar("T")


class NamespaceError(ValueError):
    """The name is invalid, or no namespace has it and clients may not create any."""


class MemoryLimitError(RuntimeError):
    """The memory limit does not allow another namespace."""


class StalledError(SnapshotError):
    """A snapshot is being written, and did not end in time. The file system may not answer."""


class Saved(NamedTuple):
    """A saved namespace."""

    name: str
    bytes: int
    seconds: float


class Failure(NamedTuple):
    """The last failure to load a namespace."""

    retry_at: float
    """When it is tried again, by `time.monotonic`."""
    reason: str


class Namespaces:
    """The namespaces by name. Used by the event loop alone; long operations run in other threads."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        on_loaded: Callable[[Namespace], None] = lambda _: None,
        on_unload: Callable[[Namespace], None] = lambda _: None,
    ) -> None:
        """Open the snapshot folder.

        `on_loaded` is called after a namespace is loaded, `on_unload` before it is unloaded.
        Raises UserError if the snapshot folder or the cost profile cannot be used, or the memory limit is too low for
        one namespace.
        """
        if max_bytes(config.drafting.capacity) > config.namespaces.memory_limit:
            raise UserError(
                f"namespaces.memory_limit: {config.namespaces.memory_limit:,} bytes are too few for a namespace of "
                f"{config.drafting.capacity:,} tokens, which needs {max_bytes(config.drafting.capacity):,}"
            )
        self._config = config
        self._profile = config.steps.profile()
        self._on_loaded, self._on_unload = on_loaded, on_unload
        self.store = Store(config.snapshots.folder, may_trim=config.snapshots.trim) if config.snapshots.folder else None
        self.loaded: dict[str, Namespace] = {}
        self._reads = config.namespaces.reads
        self._readers: dict[str, list[str]] = {}
        """Names of the namespaces that read each library."""
        for reader, libraries in self._reads.items():
            for library in libraries:
                self._readers.setdefault(library, []).append(reader)
        self.failed_saves = 0
        self._disk = DiskThreads()
        self._reserved: dict[str, int] = {}
        self._loading, self._saving = Locks(), Locks()
        """Locks by name, kept while they are held or waited for."""
        self._loads: dict[str, asyncio.Task[Namespace]] = {}
        self._next_saves: dict[Namespace, asyncio.Task[Saved]] = {}
        """Saves that have not begun to read the namespace."""
        self.failed_loads = 0
        self._failures: dict[str, Failure] = {}
        """Failures of the last `RETRY_S` seconds by namespace."""
        self._tasks: set[asyncio.Task[Any]] = set()
        """Tasks that go on if their callers are cancelled, because threads cannot be cancelled."""

    async def names(self) -> list[str]:
        """Return the names of all namespaces, including those on disk. Raises LoadError."""
        stored = await self.read_store(self.store.names) if self.store else []
        return sorted({*self.loaded, *stored})

    @property
    def set_aside(self) -> Mapping[str, list[str]]:
        """See `Store.set_aside`."""
        return {} if self.store is None else self.store.set_aside

    def known(self) -> dict[str, KnownNamespace]:
        """Return what is known of all namespaces, without access to the disk."""
        stored = self.store.known if self.store else {}
        return {
            **stored,
            **{name: KnownNamespace(each.model, each.corpus.tokens) for name, each in self.loaded.items()},
        }

    def default_of(self, model: ModelIdentity, caller: Caller) -> str:
        """Return the name of the default namespace of a model for a caller, see `find_default`.

        It is the same one for all kinds of calls, so that text is learned where engines of that caller draft.
        """

        def may_use(name: str) -> bool:
            return caller.may(Right.READ, name) or caller.may(Right.LEARN, name)

        settings = self._config.namespaces
        return find_default(model, self.known(), may_use, {*settings.configured, *settings.reads})

    def held(self, namespace: Namespace, may_read: Callable[[str], bool]) -> pb.Held:
        """Return how much a namespace remembers, and what else a caller may read if that is nothing."""
        message = pb.Held(tokens=namespace.corpus.tokens)
        if not message.tokens and namespace.name not in self._reads:
            known = self.known()
            message.other = find_other(namespace.name, namespace.model, known, may_read)
            message.other_tokens = (known[message.other].tokens or 0) if message.other else 0
        return message

    async def exists(self, name: str) -> bool:
        """Return whether a namespace is loaded or on disk. Raises LoadError."""
        if name in self.loaded or self.store is None or not NAME.fullmatch(name):
            return name in self.loaded
        return await self.read_store(self.store.has, name)

    async def read_store(self, read: Callable[..., T], *arguments: object) -> T:
        """Call a short function of the store in a thread. Raises LoadError if it fails, or takes too long."""
        late = LoadError("the snapshot folder", f"it does not answer within {DISK_LIMIT_S:.0f} s")
        try:
            return await finished(self._disk.run(read, *arguments), DISK_LIMIT_S, late)
        except (OSError, RuntimeError) as problem:
            raise (problem if problem is late else LoadError("the snapshot folder", problem)) from None

    @property
    def unevictable_bytes(self) -> int:
        """Memory that is counted for namespaces that cannot be unloaded to make room for others, in bytes."""
        idle = {name for name, namespace in self.loaded.items() if namespace.is_idle and self.store is not None}
        return sum(size for name, size in self._reserved.items() if name not in idle)

    @asynccontextmanager
    async def use(self, name: str, model: ModelIdentity) -> AsyncIterator[Namespace]:
        """Create or restore a namespace if it is not loaded, and keep it loaded within the block.

        Raises NamespaceError, MemoryLimitError, LoadError, and IdentityError for a model that differs from the
        namespace's.
        """
        if not NAME.fullmatch(name):
            raise NamespaceError(
                f"a namespace cannot be called {name[:200]!r}; use 1 to 128 letters, digits, '_', '.', '@' and '-'"
            )
        while (namespace := self.loaded.get(name)) is None:
            # It may be unloaded again before this continues.
            await self._load_once(name, model)
        namespace.adopt(model)
        namespace.active_calls += 1
        try:
            for reader in (name, *self._readers.get(name, ())):
                self._connect(reader)
            yield namespace
        finally:
            namespace.active_calls -= 1
            namespace.last_used = time.monotonic()

    @asynccontextmanager
    async def use_for_drafts(self, name: str, model: ModelIdentity) -> AsyncIterator[Namespace]:
        """Do as `use`, and keep its libraries loaded, too. Raises IdentityError for a library of another tokenizer."""
        async with AsyncExitStack() as stack:
            for library in self._reads.get(name, ()):
                await stack.enter_async_context(self.use(library, ModelIdentity()))
            namespace = await stack.enter_async_context(self.use(name, model))
            namespace.read_from(self._libraries(name))
            yield namespace

    def _libraries(self, name: str) -> list[Namespace]:
        """Return the loaded libraries of a namespace."""
        return [self.loaded[library] for library in self._reads.get(name, ()) if library in self.loaded]

    def _connect(self, name: str) -> None:
        """Let a namespace draft from its loaded libraries; from none if one has another tokenizer."""
        namespace = self.loaded.get(name)
        if namespace is None or name not in self._reads:
            return
        try:
            namespace.read_from(self._libraries(name))
        except IdentityError as problem:
            logger.error("libraries not read", namespace=name, reason=str(problem))
            namespace.read_from([])

    async def save(self, namespace: Namespace) -> Saved:
        """Write a namespace to its folder, even if the caller is cancelled during the write.

        Raises ClosedError, and SnapshotError, after which the old files remain; after StalledError they may be replaced
        later.
        """
        if self.store is None:
            raise SnapshotError("there is no snapshot folder; start the service with --snapshot-folder")
        saving = self._next_saves.get(namespace)
        if saving is None:
            saving = self._next_saves[namespace] = self._start(self._save(self.store, namespace))
        limit_s = _limit_s(namespace.memory_bytes)
        late = StalledError(f"namespace {namespace.name!r} is still being written after {limit_s:.0f} s")
        try:
            return await finished(saving, limit_s, late)
        except StalledError as problem:
            self.failed_saves += 1
            logger.error("snapshot not saved", namespace=namespace.name, reason=str(problem))
            raise

    async def _save(self, store: Store, namespace: Namespace) -> Saved:
        began = time.monotonic()
        # The lock must be held while the thread writes, so that an earlier save does not replace a later one.
        async with _lock(self._saving, namespace.name):
            del self._next_saves[namespace]
            if namespace.is_closed:
                raise ClosedError(f"namespace {namespace.name!r} was dropped")
            version, stats, description = namespace.version, namespace.stats, namespace.describe()
            try:
                size = await self._disk.run(_write, store, namespace, stats, description)
            except (SnapshotError, OSError, MemoryError, RuntimeError) as problem:
                reason = str(problem) or type(problem).__name__
                self.failed_saves += 1
                logger.error("snapshot not saved", namespace=namespace.name, reason=reason)
                raise SnapshotError(f"namespace {namespace.name!r} is not saved: {reason}") from None
            namespace.saved_version = version
        return Saved(namespace.name, size, time.monotonic() - began)

    async def save_changed(self) -> None:
        """Save all namespaces with changes; a failure is logged, and the next call tries again.

        After one that stalls the others are left for the next call, since they are in the same folder.
        """
        await self._for_each(lambda namespace: namespace.is_changed, self.save)

    async def unload_idle(self, idle_s: float) -> None:
        """Save and unload the namespaces that were not used for `idle_s` seconds; failures as in `save_changed`.

        Those with events that the shared log does not have are kept.
        """

        def is_due(namespace: Namespace) -> bool:
            is_unused = namespace.is_idle and time.monotonic() - namespace.last_used >= idle_s
            return is_unused and not namespace.has_unpublished()

        await self._for_each(is_due, self._save_and_unload)

    async def follow_log(self, forgets: Callable[[str, str | None], Awaitable[bool]]) -> None:
        """Load, one at a time, the stored namespaces whose text the shared log forgets, and save them without it.

        forgets: see `Replication.forgets`; its exceptions are raised. Other failures are logged, and the next call
        tries again. Namespaces that are loaded follow the log without this.
        """
        for name, known in list(self.store.known.items()) if self.store else []:
            if name in self.loaded or not await forgets(name, known.log_position):
                continue
            try:
                if await self.exists(name):  # Otherwise it was dropped meanwhile.
                    await self._follow_log(name)
            except (NamespaceError, MemoryLimitError, LoadError, SnapshotError, ClosedError) as problem:
                logger.warning("stored namespace not updated from the shared log", namespace=name, reason=str(problem))

    async def _follow_log(self, name: str) -> None:
        async with self.use(name, ModelIdentity()) as namespace:
            pass  # It stays idle, so that it is unloaded if another one needs the memory.
        with suppress(TimeoutError):
            async with asyncio.timeout(READ_LIMIT_S):
                while not (namespace.has_read_log() or namespace.is_closed):
                    await asyncio.sleep(READ_POLL_S)
        await self.save(namespace)
        await self._save_and_unload(namespace)

    async def _for_each(
        self, is_due: Callable[[Namespace], bool], act: Callable[[Namespace], Awaitable[object]]
    ) -> None:
        for namespace in list(self.loaded.values()) if self.store else []:
            if is_due(namespace):
                try:
                    await act(namespace)
                except StalledError:
                    return
                except (SnapshotError, ClosedError):
                    continue

    async def drop(self, name: str) -> bool:
        """Delete a namespace, with its files that were set aside; return whether it existed.

        It need not be readable. Raises LoadError, SnapshotError if files could not be deleted, and UnpublishedError.
        """
        if not await self.exists(name):
            return False
        late = SnapshotError(f"files of namespace {name!r} are not deleted yet; the file system does not answer")
        return await finished(self._start(self._drop(name)), 2 * DISK_LIMIT_S, late)

    async def _drop(self, name: str) -> bool:
        async with AsyncExitStack() as stack:
            try:
                async with asyncio.timeout(DISK_LIMIT_S):
                    for locks in (self._loading, self._saving):
                        await stack.enter_async_context(_lock(locks, name))
            except TimeoutError:
                raise SnapshotError(
                    f"files of namespace {name!r} are being read or written, so nothing was deleted; try again"
                ) from None
            # An empty one, if it is not loaded, so that other sidecars are told.
            namespace = self.loaded.get(name) or self._opened(name, ModelIdentity(), Stored(None, None))
            namespace.publish(Event(Kind.DROPPED, time.time()))
            for stream in [*namespace.streams, *namespace.followers]:
                stream.end()
            await self._unload(namespace)
            if self.store is not None:
                try:
                    await self._disk.run(self.store.delete, name)
                except (OSError, RuntimeError) as problem:
                    raise SnapshotError(f"files of namespace {name!r} cannot be deleted: {problem}") from None
            if not await namespace.is_published():
                # An empty one keeps the event, and can be dropped again.
                self._reserved[name] = max_bytes(self.drafting(name).capacity)
                self._opened(name, ModelIdentity(), Stored(None, None)).forget_before(math.inf)
                raise UnpublishedError(f"namespace {name!r} is dropped by this service")
            return True

    async def close(self) -> None:
        """Save all changes and unload all namespaces."""
        for loading in self._loads.values():
            loading.cancel()
        await self.save_changed()
        for namespace in list(self.loaded.values()):
            await self._unload(namespace)

    def drafting(self, name: str) -> DrafterConfig:
        """Return the drafter configuration of a namespace."""
        capacity = self._config.namespaces.capacities.get(name, self._config.drafting.capacity)
        return replace(self._config.drafting, capacity=capacity)

    async def _load_once(self, name: str, model: ModelIdentity) -> None:
        """Load a namespace, or wait for the load in progress, which goes on if this caller is cancelled.

        Raises as `use`, and LoadError without an attempt for `RETRY_S` seconds after a failure.
        """
        loading = self._loads.get(name)
        if loading is None:
            failure = self._failures.get(name)
            if failure is not None and (left_s := failure.retry_at - time.monotonic()) > 0:
                raise LoadError(f"namespace {name!r}", f"{failure.reason}; it is tried again in {left_s:.1f} s")
            loading = self._loads[name] = self._start(self._load(name, model))
            loading.add_done_callback(lambda _: self._loads.pop(name))
        limit_s = _limit_s(max_bytes(self.drafting(name).capacity))
        late = LoadError(f"namespace {name!r}", f"it takes longer than {limit_s:.0f} s")
        try:
            await finished(loading, limit_s, late)
        except LoadError as problem:
            if problem is late:  # The load goes on, and the next caller waits for it.
                self._count_failure(name, str(problem))
            raise

    async def _load(self, name: str, model: ModelIdentity) -> Namespace:
        async with _lock(self._loading, name):
            if name in self.loaded:
                return self.loaded[name]
            try:
                is_stored = self.store is not None and await self._disk.run(self.store.has, name)
                if not (is_stored or name in self._config.namespaces.configured or self._config.namespaces.create):
                    raise NamespaceError(f"there is no namespace {name!r}, and clients may not create any")
                drafting = self.drafting(name)
                await self._reserve(name, max_bytes(drafting.capacity))
                try:
                    stored = Stored(None, None)
                    if is_stored:
                        assert self.store is not None
                        stored = await self._disk.run(self.store.read, name, drafting.capacity, drafting.match_depth)
                    namespace = self._opened(name, model, stored)
                except BaseException:
                    del self._reserved[name]
                    raise
            except (NamespaceError, MemoryLimitError):
                raise
            except (OSError, MemoryError, RuntimeError, SnapshotError) as problem:
                reason = str(problem) or type(problem).__name__
                self._count_failure(name, reason)
                now = time.monotonic()
                self._failures = {each: failure for each, failure in self._failures.items() if failure.retry_at > now}
                self._failures[name] = Failure(now + RETRY_S, reason)
                raise LoadError(f"namespace {name!r}", reason) from None
            is_restored = stored.loaded is not None
            logger.info("namespace loaded", namespace=name, tokens=namespace.corpus.tokens, restored=is_restored)
            return namespace

    def _count_failure(self, name: str, reason: str) -> None:
        self.failed_loads += 1
        logger.error("namespace not loaded", namespace=name, reason=reason)

    def _opened(self, name: str, model: ModelIdentity, stored: Stored) -> Namespace:
        """Return a new namespace with its stored parts, after adding it to those that are loaded."""
        description, loaded, learned = stored
        drafting = self.drafting(name)
        namespace = Namespace(
            name,
            model,
            drafting,
            loaded.corpus if loaded else Corpus.from_config(drafting),
            learned=learned,
            stats=loaded.stats if loaded else None,
            max_waiting=self._config.limits.waiting_tokens,
            profile=self._profile,
        )
        if description is not None:
            namespace.restore(description)
        if loaded is None:
            # Without its corpus the namespace has to read the whole log.
            namespace.restored_position = None
        self.loaded[name] = namespace
        self._failures.pop(name, None)
        namespace.record_sample(time.time())
        self._on_loaded(namespace)
        return namespace

    async def _reserve(self, name: str, size: int) -> None:
        """Reserve memory, by unloading idle namespaces if needed, the longest idle first. Raises MemoryLimitError."""
        limit = self._config.namespaces.memory_limit
        while sum(self._reserved.values()) + size > limit:
            idle = [namespace for namespace in self.loaded.values() if namespace.is_idle]
            if not idle or self.store is None or size > limit:
                raise MemoryLimitError(
                    f"namespace {name!r} needs up to {size:,} bytes; {sum(self._reserved.values()):,} of the "
                    f"limit of {limit:,} are in use: raise --memory-limit, or lower --capacity"
                )
            try:
                await self._save_and_unload(min(idle, key=lambda each: (each.has_unpublished(), each.last_used)))
            except ClosedError:
                continue
            except SnapshotError as problem:
                raise MemoryLimitError(f"no idle namespace can be saved to make room: {problem}") from None
        self._reserved[name] = size

    async def _save_and_unload(self, namespace: Namespace) -> None:
        """Save a namespace, and unload it unless it was used meanwhile. Raises SnapshotError, and ClosedError."""
        last_used = namespace.last_used
        if namespace.is_changed:
            await self.save(namespace)
        async with _lock(self._loading, namespace.name):
            is_unused = namespace.is_idle and namespace.last_used == last_used
            if is_unused and self.loaded.get(namespace.name) is namespace:
                if _lock(self._saving, namespace.name).locked():
                    # The thread that writes it would keep its memory without a reservation.
                    raise StalledError(f"namespace {namespace.name!r} is still being written")
                logger.info("namespace unloaded", namespace=namespace.name)
                await self._unload(namespace)

    async def _unload(self, namespace: Namespace) -> None:
        self._on_unload(namespace)
        del self.loaded[namespace.name]
        for reader in self._readers.get(namespace.name, ()):
            self._connect(reader)
        namespace.close()
        try:
            # This waits for a merge, which may take seconds.
            await asyncio.to_thread(namespace.corpus.close)
        finally:
            self._reserved.pop(namespace.name, None)

    def _start(self, work: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
        """Return a task for an operation that goes on if its caller is cancelled."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


def _limit_s(size: int) -> float:
    """Return how long a caller waits for a file of `size` bytes, in seconds."""
    return DISK_LIMIT_S + size / DISK_BYTES_PER_S


def _lock(locks: Locks, name: str) -> asyncio.Lock:
    return locks.setdefault(name, asyncio.Lock())


def max_bytes(capacity: int) -> int:
    """Return the maximum memory of a namespace that remembers `capacity` tokens, in bytes."""
    return MIN_BYTES + BYTES_PER_TOKEN * capacity


def _write(store: Store, namespace: Namespace, stats: Stats, description: Description) -> int:
    store.make_folder(namespace.name)
    size = snapshot.save(namespace.corpus, store.corpus_path(namespace.name), stats)
    store.write_description(description)
    return size
