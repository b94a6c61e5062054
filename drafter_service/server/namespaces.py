"""All namespaces of a service: created or restored on first use, saved, unloaded when idle, within a memory limit."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from drafter_service.observability.facts import History, ModelIdentity
from drafter_service.replication.events import Dropped
from drafter_service.server.namespace import ClosedError, IdentityError, Namespace
from drafter_service.server.store import NAME, Description, Store
from drafter_service.settings.tree import ServiceConfig
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import SnapshotError
from ssd.corpus.snapshot import Loaded
from ssd.errors import UserError
from ssd.stats import Stats

logger = structlog.get_logger(__name__)

BYTES_PER_TOKEN = 15
"""Peak memory per token of capacity, in bytes, during a merge."""
MIN_BYTES = 25_000_000
"""Memory of a namespace besides its tokens, in bytes: learned probabilities, running text, buffers."""

Locks = WeakValueDictionary[str, asyncio.Lock]


class NamespaceError(ValueError):
    """The name is invalid, or no namespace has it and clients may not create any."""


class MemoryLimitError(RuntimeError):
    """The memory limit does not allow another namespace."""


class Saved(NamedTuple):
    """A saved namespace."""

    name: str
    bytes: int
    seconds: float


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
        self.store = Store(config.snapshots.folder) if config.snapshots.folder else None
        self.loaded: dict[str, Namespace] = {}
        self._reads = config.namespaces.reads
        self._readers = defaultdict[str, list[str]](list)
        """Names of the namespaces that read each one."""
        for reader, libraries in self._reads.items():
            for library in libraries:
                self._readers[library].append(reader)
        self.failed_saves = 0
        self._reserved: dict[str, int] = {}
        self._loading, self._saving = Locks(), Locks()
        """Locks by name, kept while they are held or waited for."""
        self._saves: set[asyncio.Task[Saved]] = set()

    def names(self) -> list[str]:
        """Return the names of all namespaces, including those on disk."""
        return sorted({*self.loaded, *(self.store.names() if self.store else [])})

    @property
    def unevictable_bytes(self) -> int:
        """Memory that is counted for namespaces that cannot be unloaded to make room for others, in bytes."""
        idle = {name for name, namespace in self.loaded.items() if namespace.is_idle and self.store is not None}
        return sum(size for name, size in self._reserved.items() if name not in idle)

    @asynccontextmanager
    async def use(self, name: str, model: ModelIdentity) -> AsyncIterator[Namespace]:
        """Create or restore a namespace if it is not loaded, and keep it loaded within the block.

        Raises NamespaceError, MemoryLimitError, and IdentityError for a model that differs from the namespace's.
        """
        if not NAME.fullmatch(name):
            raise NamespaceError(
                f"a namespace cannot be called {name[:200]!r}; use 1 to 128 letters, digits, '_', '.', '@' and '-'"
            )
        async with _lock(self._loading, name):
            namespace = self.loaded.get(name) or await self._load(name, model)
            namespace.adopt(model)
            namespace.active_calls += 1
        try:
            for reader in (name, *self._readers[name]):
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

        Raises ClosedError, and SnapshotError, after which the old files remain.
        """
        if self.store is None:
            raise SnapshotError("there is no snapshot folder; start the service with --snapshot-folder")
        # The lock must be held while the thread writes, so that an earlier save does not replace a later one.
        saving = asyncio.create_task(self._save(self.store, namespace))
        self._saves.add(saving)
        saving.add_done_callback(self._saves.discard)
        return await asyncio.shield(saving)

    async def _save(self, store: Store, namespace: Namespace) -> Saved:
        began = time.monotonic()
        async with _lock(self._saving, namespace.name):
            if namespace.is_closed:
                raise ClosedError(f"namespace {namespace.name!r} was dropped")
            version, stats, description = namespace.version, namespace.stats, _describe(namespace)
            try:
                size = await asyncio.to_thread(_write, store, namespace, stats, description)
            except (SnapshotError, OSError) as problem:
                self.failed_saves += 1
                logger.error("snapshot not saved", namespace=namespace.name, reason=str(problem))
                raise SnapshotError(str(problem)) from None
            namespace.saved_version = version
        return Saved(namespace.name, size, time.monotonic() - began)

    async def save_changed(self) -> None:
        """Save all namespaces with changes; a failure is logged, and the next call tries again."""
        for namespace in list(self.loaded.values()) if self.store else []:
            if namespace.is_changed:
                with suppress(SnapshotError, ClosedError):
                    await self.save(namespace)

    async def unload_idle(self, idle_s: float) -> None:
        """Save and unload the namespaces that were not used for `idle_s` seconds; failures as in `save_changed`."""
        for namespace in list(self.loaded.values()) if self.store else []:
            if namespace.is_idle and time.monotonic() - namespace.last_used >= idle_s:
                with suppress(SnapshotError):
                    await self._save_and_unload(namespace)

    async def drop(self, name: str) -> bool:
        """Delete a namespace; return whether it existed. Raises SnapshotError if files could not be deleted."""
        async with _lock(self._loading, name), _lock(self._saving, name):
            namespace = self.loaded.get(name)
            if namespace is not None:
                namespace.publish(Dropped(time.time()))
                for stream in list(namespace.streams):
                    stream.end()
                await self._unload(namespace)
            if self.store is None or not self.store.has(name):
                return namespace is not None
            try:
                await asyncio.to_thread(self.store.delete, name)
            except OSError as problem:
                raise SnapshotError(f"files of namespace {name!r} cannot be deleted: {problem}") from None
            return True

    async def close(self) -> None:
        """Save all changes and unload all namespaces."""
        await self.save_changed()
        for namespace in list(self.loaded.values()):
            await self._unload(namespace)

    def drafting(self, name: str) -> DrafterConfig:
        """Return the drafter configuration of a namespace."""
        capacity = self._config.namespaces.capacities.get(name, self._config.drafting.capacity)
        return replace(self._config.drafting, capacity=capacity)

    async def _load(self, name: str, model: ModelIdentity) -> Namespace:
        is_known = name in self._config.namespaces.configured or (self.store is not None and self.store.has(name))
        if not is_known and not self._config.namespaces.create:
            raise NamespaceError(f"there is no namespace {name!r}, and clients may not create any")
        stored = self.store.describe(name) if self.store else None
        drafting = self.drafting(name)
        await self._reserve(name, max_bytes(drafting.capacity))
        try:
            loaded = await asyncio.to_thread(self._restore, name, drafting)
            corpus = loaded.corpus if loaded else Corpus.from_config(drafting)
            stats = loaded.stats if loaded else None
            waiting = self._config.limits.waiting_tokens
            namespace = Namespace(
                name, model, drafting, corpus, stats=stats, max_waiting=waiting, profile=self._profile
            )
        except BaseException:
            del self._reserved[name]
            raise
        if stored is not None:
            _restore_description(stored, namespace)
        if loaded is None:
            # Without its corpus the namespace has to read the whole log.
            namespace.restored_position = None
        self.loaded[name] = namespace
        namespace.record_sample(time.time())
        self._on_loaded(namespace)
        logger.info("namespace loaded", namespace=name, tokens=namespace.corpus.tokens, restored=loaded is not None)
        return namespace

    def _restore(self, name: str, drafting: DrafterConfig) -> Loaded | None:
        """Load the stored corpus; one that cannot be used is renamed and logged."""
        if self.store is None or not self.store.corpus_path(name).exists():
            return None
        try:
            return snapshot.load(self.store.corpus_path(name), drafting.capacity, drafting.match_depth)
        except SnapshotError as problem:
            logger.error("snapshot refused", namespace=name, reason=str(problem))
            try:
                logger.info("snapshot renamed", namespace=name, path=self.store.move_refused(name))
            except OSError as stuck:
                logger.error("snapshot not renamed", namespace=name, reason=str(stuck))
            return None

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
                await self._save_and_unload(min(idle, key=lambda namespace: namespace.last_used))
            except SnapshotError as problem:
                raise MemoryLimitError(f"no idle namespace can be saved to make room: {problem}") from None
        self._reserved[name] = size

    async def _save_and_unload(self, namespace: Namespace) -> None:
        async with _lock(self._loading, namespace.name):
            if namespace.is_idle and self.loaded.get(namespace.name) is namespace:
                if namespace.is_changed:
                    await self.save(namespace)
                logger.info("namespace unloaded", namespace=namespace.name)
                await self._unload(namespace)

    async def _unload(self, namespace: Namespace) -> None:
        self._on_unload(namespace)
        del self.loaded[namespace.name]
        for reader in self._readers[namespace.name]:
            self._connect(reader)
        namespace.close()
        try:
            # This waits for a merge, which may take seconds.
            await asyncio.to_thread(namespace.corpus.close)
        finally:
            del self._reserved[namespace.name]


def _lock(locks: Locks, name: str) -> asyncio.Lock:
    return locks.setdefault(name, asyncio.Lock())


def max_bytes(capacity: int) -> int:
    """Return the maximum memory of a namespace that remembers `capacity` tokens, in bytes."""
    return MIN_BYTES + BYTES_PER_TOKEN * capacity


def _describe(namespace: Namespace) -> Description:
    """Return a copy of the data that is stored beside a corpus, for another thread to write."""
    return Description(
        name=namespace.name,
        model=namespace.model,
        clients=namespace.clients.model_copy(),
        duplicates=namespace.duplicates,
        log_position=namespace.log_position() if namespace.log_position else namespace.restored_position,
        history=[tuple(sample) for sample in namespace.history.samples],
    )


def _restore_description(stored: Description, namespace: Namespace) -> None:
    namespace.model, namespace.clients, namespace.duplicates = stored.model, stored.clients, stored.duplicates
    namespace.restored_position = stored.log_position
    namespace.history = History()
    for sample in stored.samples():
        namespace.history.record(sample)


def _write(store: Store, namespace: Namespace, stats: Stats, description: Description) -> int:
    store.make_folder(namespace.name)
    size = snapshot.save(namespace.corpus, store.corpus_path(namespace.name), stats)
    store.write_description(description)
    return size
