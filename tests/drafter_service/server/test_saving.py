"""Namespaces that are saved and restored, and unloaded when they are idle or memory is needed."""

import asyncio
import gc
import time
import weakref
from contextlib import AsyncExitStack, ExitStack

import pytest

from drafter_service.replication.replicated import Replication
from drafter_service.server import namespaces as module
from drafter_service.server.disk import LoadError
from drafter_service.server.namespace import ClosedError
from drafter_service.server.namespaces import MemoryLimitError, Namespaces, StalledError, max_bytes
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits, LogConfig, NamespacesConfig, ServiceConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import batch, counted, finish, start
from tests.drafter_service.server.opened_namespaces import (
    DRAFTING,
    UNKNOWN_MODEL,
    blocked_writes,
    draft_of,
    learned,
    limit_disk,
    opened,
    raising,
    saved,
)
from tests.redis import running_redis
from tests.strategies import array


@run
async def test_a_saved_namespace_is_restored_after_a_restart(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        session = Session(namespace, Limits())
        session.answer(pb.DraftRequest(starts=[start(1, [1])], batch=batch({1: [2, 3]})), may_learn=True)
        namespace.clients.timeouts = 5
        namespace.learn(array([7]), "a-0")
        namespace.record_sample(100.0)
        namespace.log_position = lambda: "12-3"
        assert namespace.is_changed
        await namespaces.close()
    async with opened(tmp_path) as namespaces:
        again = await learned(namespaces, "a")
        assert not again.is_changed
        assert draft_of(again, [1, 2, 3], 1) == [4]
        assert (again.stats.committed, again.clients.timeouts, again.duplicates) == (2, 5, 1)
        assert again.learn(array([6, 7]), None)
        assert again.facts().corpus.learned_tokens == 6
        assert again.history.samples[0].time == 100.0
        assert again.restored_position == "12-3"
        # Text of a known name is not learned again.
        assert not again.learn(array([1, 2, 3, 9]), "a-0")


@run
@pytest.mark.parametrize("is_unloaded", [False, True])
async def test_text_that_was_forgotten_while_it_was_produced_is_not_learned_after_a_restart(tmp_path, is_unloaded):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a")
        namespace.forget("secret")
        assert namespace.is_changed
        if is_unloaded:
            await namespaces.unload_idle(0)
            assert not namespaces.loaded
        else:
            await namespaces.close()
    async with opened(tmp_path) as namespaces:
        again = await learned(namespaces, "a")
        session = Session(again, Limits())
        # A client that connects again starts its sequences with their text and age, and sends others that have ended.
        running = [start(number, counted(100 * number), request_id="secret", age_s=60.0) for number in (1, 2)]
        session.answer(pb.DraftRequest(starts=running[:1], batch=batch({1: [7, 8]})), may_learn=True)
        session.answer(pb.DraftRequest(starts=running[1:], finishes=[finish(1, [9]), finish(2, [9])]), may_learn=True)
        new = start(3, counted(300), request_id="secret")
        session.answer(pb.DraftRequest(starts=[new], finishes=[finish(3, [9])]), may_learn=True)
        session.close()
        again.corpus.refresh()
        assert again.corpus.requests == 1
        assert draft_of(again, [*counted(100), 7, 8], 1) == draft_of(again, counted(200), 1) == []
        assert draft_of(again, counted(300), 1) == [9]


@run
async def test_a_namespace_that_cannot_be_saved_stays_loaded_and_is_counted(tmp_path, monkeypatch):
    async with opened(tmp_path, fit=1) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        await namespaces.save(namespace)
        namespace.learn(array([1, 2, 3, 9, 9]), None)
        with monkeypatch.context() as patch:
            patch.setattr(module, "_write", raising(OSError(28, "No space left on device")))
            with pytest.raises(MemoryLimitError, match=r"no idle namespace can be saved .* No space left"):
                await learned(namespaces, "b")
            await namespaces.unload_idle(0)
            await namespaces.save_changed()
        assert namespaces.failed_saves == 3
        assert namespaces.loaded == {"a": namespace}
        assert namespace.is_changed
        await namespaces.save_changed()
        assert not namespace.is_changed


@run
async def test_a_save_continues_when_its_caller_is_cancelled_and_the_next_one_waits(tmp_path, monkeypatch):
    """Otherwise the older of two snapshots could replace the newer one."""
    may_write, begun = blocked_writes(monkeypatch)
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        impatient = asyncio.create_task(namespaces.save(namespace))
        await asyncio.to_thread(begun.acquire, timeout=60)
        impatient.cancel()
        await asyncio.wait([impatient])
        assert impatient.cancelled()
        namespace.learn(array([5, 6, 7, 8]), None)
        second = asyncio.create_task(namespaces.save(namespace))
        assert not await asyncio.to_thread(begun.acquire, timeout=0.2)
        may_write.set()
        await second
        assert not namespace.is_changed
    async with opened(tmp_path) as namespaces:
        again = await learned(namespaces, "a")
        assert draft_of(again, [5, 6, 7], 1) == [8]


@run
async def test_a_damaged_snapshot_is_renamed_and_the_service_continues(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        namespace.log_position = lambda: "12-3"
        await namespaces.save(namespace)
        path = namespaces.store.corpus_path("a")
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    async with opened(tmp_path) as namespaces:
        again = await learned(namespaces, "a")
        assert again.corpus.tokens == 0
        # The log that the lost corpus had read must be read again.
        assert again.restored_position is None
        assert path.with_suffix(".refused").read_bytes() == data
        again.learn(array([5, 6, 7, 8]), None)
        await namespaces.save(again)
    async with opened(tmp_path) as namespaces:
        assert draft_of(await learned(namespaces, "a"), [5, 6, 7], 1) == [8]


@run
async def test_a_corpus_without_its_description_is_restored_and_can_be_dropped(tmp_path):
    await saved(tmp_path)
    (tmp_path / "a" / "namespace.json").unlink()
    async with opened(tmp_path, create=False) as namespaces:
        assert await namespaces.names() == ["a"]
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]
        assert await namespaces.drop("a")
        assert list(tmp_path.iterdir()) == []


@run
async def test_a_waiting_save_does_not_restore_a_dropped_namespace(tmp_path, monkeypatch):
    may_write, begun = blocked_writes(monkeypatch)
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        first = asyncio.create_task(namespaces.save(namespace))
        await asyncio.to_thread(begun.acquire, timeout=60)
        dropping = asyncio.create_task(namespaces.drop("a"))
        await asyncio.sleep(0)
        second = asyncio.create_task(namespaces.save(namespace))
        await asyncio.sleep(0)
        may_write.set()
        assert (await first).name == "a"
        assert await dropping
        with pytest.raises(ClosedError):
            await second
        assert list(tmp_path.iterdir()) == []


RELEASE_TIMEOUT_S = 60


@run
async def test_the_longest_idle_namespace_is_unloaded_and_restored(tmp_path):
    async with opened(tmp_path, fit=2) as namespaces:
        for name, last in (("a", 4), ("b", 5), ("c", 6)):
            await learned(namespaces, name, [1, 2, 3, last])
        assert sorted(namespaces.loaded) == ["b", "c"]
        assert await namespaces.names() == ["a", "b", "c"]
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]
        assert sorted(namespaces.loaded) == ["a", "c"]
        assert draft_of(await learned(namespaces, "b"), [1, 2, 3], 1) == [5]


@run
async def test_a_namespace_whose_text_waits_for_the_shared_log_is_unloaded_last(tmp_path):
    async with opened(tmp_path, fit=2) as namespaces:
        first = await learned(namespaces, "a")
        first.has_unpublished = lambda: True
        for name in "bc":
            await learned(namespaces, name)
        assert sorted(namespaces.loaded) == ["a", "c"]
        await namespaces.unload_idle(0)
        assert [*namespaces.loaded] == ["a"]
        await learned(namespaces, "d")
        namespaces.loaded["d"].has_unpublished = lambda: True
        await learned(namespaces, "e")
        assert sorted(namespaces.loaded) == ["d", "e"]
        first.has_unpublished = lambda: False
        await namespaces.unload_idle(0)
        assert [*namespaces.loaded] == ["d"]


@run
async def test_namespaces_in_use_are_not_unloaded_and_others_once_they_are_idle(tmp_path):
    async with opened(tmp_path, fit=2) as namespaces, AsyncExitStack() as stack:
        # A call uses one namespace, and a stream uses the other.
        first = await stack.enter_async_context(namespaces.use("a", UNKNOWN_MODEL))
        session = Session(await learned(namespaces, "b"), Limits())
        with pytest.raises(MemoryLimitError, match="'c' needs up to 25,075,000 bytes; 50,150,000 of the limit"):
            await learned(namespaces, "c")
        await namespaces.unload_idle(0)
        assert sorted(namespaces.loaded) == ["a", "b"]
        assert first is namespaces.loaded["a"]
        session.close()
        idle = await learned(namespaces, "c")
        await namespaces.unload_idle(3600)
        assert sorted(namespaces.loaded) == ["a", "c"]
        await namespaces.unload_idle(0)
        assert [*namespaces.loaded] == ["a"]
        assert idle.is_closed


def test_memory_limit_below_one_namespace_is_refused():
    with pytest.raises(
        UserError, match=r"namespaces.memory_limit: 12,537,500 bytes are too few .* which needs 25,075,000"
    ):
        Namespaces(ServiceConfig(drafting=DRAFTING, namespaces=NamespacesConfig(memory_limit=12_537_500)))


@pytest.mark.parametrize("has_folder", [False, True])
@run
async def test_without_a_folder_no_namespace_can_be_unloaded(tmp_path, has_folder):
    async with opened(tmp_path if has_folder else None, fit=2) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        async with namespaces.use("b", UNKNOWN_MODEL):
            used = namespaces.unevictable_bytes
        size = max_bytes(DRAFTING.capacity)
        assert used == (size if has_folder else 2 * size)
        assert namespaces.unevictable_bytes == (0 if has_folder else 2 * size)
        if not has_folder:
            with pytest.raises(MemoryLimitError):
                await learned(namespaces, "c")
            assert draft_of(namespace, [1, 2, 3], 1) == [4]


@run
async def test_waiting_for_memory_does_not_deadlock(tmp_path, monkeypatch):
    """A namespace is requested while it is being unloaded, and a third namespace needs its memory."""
    may_write, begun = blocked_writes(monkeypatch)
    async with opened(tmp_path, fit=1) as namespaces, AsyncExitStack() as stack:
        await learned(namespaces, "a", [1, 2, 3, 4])
        going = asyncio.create_task(namespaces.unload_idle(0))
        await asyncio.to_thread(begun.acquire, timeout=60)
        wanted = asyncio.create_task(stack.enter_async_context(namespaces.use("a", UNKNOWN_MODEL)))
        await asyncio.sleep(0)
        third = asyncio.create_task(learned(namespaces, "b"))
        await asyncio.sleep(0)
        may_write.set()
        await going
        assert draft_of(await wanted, [1, 2, 3], 1) == [4]
        with pytest.raises(MemoryLimitError):
            await third


@run
async def test_a_namespace_that_is_being_written_keeps_its_reservation(tmp_path, monkeypatch):
    """The thread that writes uses its memory, even if it has no changes. Nothing waits for longer than the limit."""
    may_write, begun = blocked_writes(monkeypatch)
    async with opened(tmp_path, fit=1) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        limit_disk(monkeypatch, 0.05)
        for is_changed in (True, False):
            if not is_changed:
                namespace.saved_version = namespace.version
            for _ in range(3):
                with pytest.raises(StalledError, match="'a' is still being written after 0 s"):
                    await namespaces.save(namespace)
                with pytest.raises((MemoryLimitError, LoadError), match=r"to make room|takes longer than"):
                    await learned(namespaces, "b")
                await namespaces.unload_idle(0)
                await namespaces.save_changed()
            assert namespaces.loaded == {"a": namespace}
            assert len(namespaces._reserved) == 1
        # One save runs, and all others wait together.
        while len(namespaces._tasks) > 2:  # Loads that are given up.
            await asyncio.sleep(0.001)
        assert len(namespaces._tasks) == 2
        assert namespaces.failed_saves > 6
        with pytest.raises(SnapshotError, match="are being read or written, so nothing was deleted"):
            await namespaces.drop("a")
        limit_disk(monkeypatch, 60)
        may_write.set()
        while namespaces._tasks:
            await asyncio.sleep(0.001)
        assert begun._value == 2
        assert (await learned(namespaces, "b")).name == "b"
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]


@pytest.mark.parametrize("has_log", [False, True], ids=["alone", "with a shared log"])
def test_the_memory_of_an_unloaded_namespace_is_released_at_once(has_log):
    """Without waiting for the garbage collector, which may leave it for minutes."""

    @run
    async def unload(url):
        replication = Replication(LogConfig(url=url))
        namespaces = Namespaces(
            ServiceConfig(drafting=DRAFTING), on_loaded=replication.add, on_unload=replication.remove
        )
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        assert draft_of(namespace, [1, 2, 3], 1) == [4]
        while has_log and not replication.facts().published_tokens:
            await asyncio.sleep(0)
        corpus = weakref.ref(namespace.corpus)
        del namespace
        await namespaces.drop("a")
        await replication.stop()
        until = time.monotonic() + RELEASE_TIMEOUT_S
        while corpus() is not None:  # A worker thread holds its last task for a moment after the result is there.
            assert time.monotonic() < until
            await asyncio.sleep(0.001)

    with ExitStack() as stack:
        url = stack.enter_context(running_redis()).url if has_log else None
        gc.collect()
        gc.disable()
        try:
            unload(url)
        finally:
            gc.enable()
