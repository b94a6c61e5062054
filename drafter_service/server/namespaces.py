"""All namespaces of a service: made or restored on first use, saved, let go when they are idle, within one budget."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import NamedTuple
from weakref import WeakValueDictionary

import structlog

from drafter_service.observability.facts import History, ModelIdentity
from drafter_service.observability.passages import Passages
from drafter_service.replication.events import Dropped
from drafter_service.server.namespace import ClosedError, Namespace
from drafter_service.server.store import NAME, Description, Store, describe
from drafter_service.settings.tree import ServiceConfig
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import SnapshotError
from ssd.corpus.snapshot import Loaded
from ssd.errors import UserError

logger = structlog.get_logger(__name__)

BYTES_PER_TOKEN = 15
"""Of capacity, at the peak of a merge."""
BYTES_AT_LEAST = 25_000_000
"""Of a small namespace: odds, live text, buffers."""


class NamespaceError(ValueError):
    """A namespace cannot have this name, or there is none of this name and none may be made."""


class BudgetError(RuntimeError):
    """There is no memory for another namespace."""


class Saved(NamedTuple):
    """What came of saving a namespace."""

    name: str
    bytes: int
    seconds: float


class Namespaces:
    """The namespaces by name. The event loop alone uses it; what takes long is done in other threads."""

    def __init__(
        self,
        config: ServiceConfig,
        *,
        on_loaded: Callable[[Namespace], None] = lambda _: None,
        on_leaving: Callable[[Namespace], None] = lambda _: None,
    ) -> None:
        """`on_loaded` and `on_leaving` are told when a namespace comes into memory, and before it leaves it.

        Raises UserError if the snapshot folder cannot be used, or the memory limit is too low for one namespace.
        """
        if most_bytes(config.drafting.capacity) > config.namespaces.memory_limit:
            raise UserError(
                f"namespaces.memory_limit: {config.namespaces.memory_limit:,} bytes are too few for a namespace of "
                f"{config.drafting.capacity:,} tokens, which needs {most_bytes(config.drafting.capacity):,}"
            )
        self._config = config
        self._on_loaded, self._on_leaving = on_loaded, on_leaving
        self.store = Store(config.snapshots.folder) if config.snapshots.folder else None
        self.loaded: dict[str, Namespace] = {}
        self.failed_saves = 0
        self._reserved: dict[str, int] = {}
        self._loading, self._saving = Locks(), Locks()
        self._saves: set[asyncio.Task[Saved]] = set()

    def names(self) -> list[str]:
        """All namespaces, those on disk included."""
        return sorted({*self.loaded, *(self.store.names() if self.store else [])})

    @asynccontextmanager
    async def use(self, name: str, model: ModelIdentity) -> AsyncIterator[Namespace]:
        """A namespace, made or restored if it is not in memory, which it does not leave meanwhile.

        Raises NamespaceError, BudgetError, and IdentityError for another model than it was made for.
        """
        if not NAME.fullmatch(name):
            raise NamespaceError(
                f"a namespace cannot be called {name[:200]!r}; use 1 to 128 letters, digits, '_', '.', '@' and '-'"
            )
        async with self._loading.of(name):
            namespace = self.loaded.get(name) or await self._load(name, model)
            namespace.adopt(model)
            namespace.holds += 1
        try:
            yield namespace
        finally:
            namespace.holds -= 1
            namespace.last_used = time.monotonic()

    async def save(self, namespace: Namespace) -> Saved:
        """Write a namespace to its folder, even if the caller goes away meanwhile.

        Raises SnapshotError, the old files stay then, and ClosedError.
        """
        if self.store is None:
            raise SnapshotError("there is no snapshot folder; start the service with --snapshot-folder")
        # The lock must be held for as long as the thread writes: a later save must not be overtaken by an earlier one.
        saving = asyncio.create_task(self._save(self.store, namespace))
        self._saves.add(saving)
        saving.add_done_callback(self._saves.discard)
        return await asyncio.shield(saving)

    async def _save(self, store: Store, namespace: Namespace) -> Saved:
        began = time.monotonic()
        async with self._saving.of(namespace.name):
            if namespace.is_closed:
                raise ClosedError(f"namespace {namespace.name!r} was dropped")
            total, kept = namespace.total, _description(namespace)
            try:
                size = await asyncio.to_thread(_write, store, namespace, kept)
            except (SnapshotError, OSError) as problem:
                self.failed_saves += 1
                logger.error("snapshot not saved", namespace=namespace.name, reason=str(problem))
                raise SnapshotError(str(problem)) from None
            namespace.note_saved(total)
        return Saved(namespace.name, size, time.monotonic() - began)

    async def save_changed(self) -> None:
        """Save all that has something new; what cannot be saved is logged and tried again the next time."""
        for namespace in list(self.loaded.values()) if self.store else []:
            if namespace.is_changed:
                with suppress(SnapshotError, ClosedError):
                    await self.save(namespace)

    async def let_idle_go(self, idle_s: float) -> None:
        """Save the namespaces that nobody used for so long, and take them out of memory, as `save_changed`."""
        for namespace in list(self.loaded.values()) if self.store else []:
            if namespace.is_idle and time.monotonic() - namespace.last_used >= idle_s:
                with suppress(SnapshotError):
                    await self._let_go(namespace)

    async def drop(self, name: str) -> bool:
        """Forget a namespace whole; whether there was one. Raises SnapshotError if files of it stay."""
        async with self._loading.of(name), self._saving.of(name):
            namespace = self.loaded.get(name)
            if namespace is not None:
                namespace.publish(Dropped(time.time()))
                for stream in list(namespace.streams):
                    stream.end()
                await self._leave(namespace)
            if self.store is None or not self.store.has(name):
                return namespace is not None
            try:
                await asyncio.to_thread(self.store.delete, name)
            except OSError as problem:
                raise SnapshotError(f"files of namespace {name!r} stay on disk: {problem}") from None
            return True

    async def close(self) -> None:
        """Save what is new and stop."""
        await self.save_changed()
        for namespace in list(self.loaded.values()):
            await self._leave(namespace)

    def drafting(self, name: str) -> DrafterConfig:
        """How a namespace drafts."""
        capacity = self._config.namespaces.capacities.get(name, self._config.drafting.capacity)
        policy = self._config.namespaces.policies.get(name, self._config.drafting.policy)
        return replace(self._config.drafting, capacity=capacity, policy=policy)

    async def _load(self, name: str, model: ModelIdentity) -> Namespace:
        is_known = name in self._config.namespaces.capacities or (self.store is not None and self.store.has(name))
        if not is_known and not self._config.namespaces.create:
            raise NamespaceError(f"there is no namespace {name!r}, and clients may not make any")
        kept = self.store.describe(name) if self.store else None
        drafting = self.drafting(name)
        await self._reserve(name, most_bytes(drafting.capacity))
        try:
            loaded = await asyncio.to_thread(self._restore, name, drafting)
            corpus = loaded.corpus if loaded else Corpus(drafting.capacity, drafting.match_depth)
            passages = Passages() if self._config.reports.passages else None
            stats = loaded.stats if loaded else None
            namespace = Namespace(name, model, drafting, corpus, stats=stats, passages=passages)
        except BaseException:
            del self._reserved[name]
            raise
        if kept is not None:
            _take_over(kept, namespace)
        if loaded is None:
            # Without its corpus the namespace has read nothing.
            namespace.restored_position = None
        self.loaded[name] = namespace
        namespace.note_sample(time.time())
        self._on_loaded(namespace)
        logger.info("namespace loaded", namespace=name, tokens=namespace.corpus.tokens, restored=loaded is not None)
        return namespace

    def _restore(self, name: str, drafting: DrafterConfig) -> Loaded | None:
        """The corpus that lies on disk; one that cannot be used is set aside, with a word of why."""
        if self.store is None or not self.store.corpus_path(name).exists():
            return None
        try:
            return snapshot.load(self.store.corpus_path(name), drafting.capacity, drafting.match_depth)
        except SnapshotError as problem:
            logger.error("snapshot refused", namespace=name, reason=str(problem))
            try:
                logger.info("snapshot set aside", namespace=name, path=self.store.set_aside(name))
            except OSError as stuck:
                logger.error("snapshot not set aside", namespace=name, reason=str(stuck))
            return None

    async def _reserve(self, name: str, size: int) -> None:
        """Make room in the budget, by letting idle namespaces go, the longest idle first. Raises BudgetError."""
        limit = self._config.namespaces.memory_limit
        while sum(self._reserved.values()) + size > limit:
            idle = [namespace for namespace in self.loaded.values() if namespace.is_idle]
            if not idle or self.store is None or size > limit:
                raise BudgetError(
                    f"namespace {name!r} needs up to {size:,} bytes; {sum(self._reserved.values()):,} of the "
                    f"limit of {limit:,} are in use: raise --memory-limit, or lower --capacity"
                )
            try:
                await self._let_go(min(idle, key=lambda namespace: namespace.last_used))
            except SnapshotError as problem:
                raise BudgetError(f"no idle namespace can be saved to make room: {problem}") from None
        self._reserved[name] = size

    async def _let_go(self, namespace: Namespace) -> None:
        async with self._loading.of(namespace.name):
            if namespace.is_idle and self.loaded.get(namespace.name) is namespace:
                if namespace.is_changed:
                    await self.save(namespace)
                logger.info("namespace let go", namespace=namespace.name)
                await self._leave(namespace)

    async def _leave(self, namespace: Namespace) -> None:
        self._on_leaving(namespace)
        del self.loaded[namespace.name]
        namespace.close()
        try:
            # Waits for a merge, which may take seconds.
            await asyncio.to_thread(namespace.corpus.close)
        finally:
            del self._reserved[namespace.name]


class Locks:
    """A lock for each name, while anybody holds it or waits for it."""

    def __init__(self) -> None:
        self._locks: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()

    def of(self, name: str) -> asyncio.Lock:
        """The lock of a name."""
        return self._locks.setdefault(name, asyncio.Lock())


def most_bytes(capacity: int) -> int:
    """What a namespace that remembers so many tokens can cost."""
    return BYTES_AT_LEAST + BYTES_PER_TOKEN * capacity


def _description(namespace: Namespace) -> Description:
    return describe(
        namespace.name,
        namespace.model,
        namespace.clients,
        namespace.duplicates,
        namespace.log_position(),
        time.time(),
        namespace.history.samples,
    )


def _take_over(kept: Description, namespace: Namespace) -> None:
    namespace.model, namespace.clients, namespace.duplicates = kept.model, kept.clients, kept.duplicates
    namespace.restored_position = kept.log_position
    namespace.history = History()
    for sample in kept.samples():
        namespace.history.note(sample)


def _write(store: Store, namespace: Namespace, kept: Description) -> int:
    store.make_room_for(namespace.name)
    size = snapshot.save(namespace.corpus, store.corpus_path(namespace.name), namespace.stats)
    store.write_description(kept)
    return size
