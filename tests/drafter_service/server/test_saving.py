"""Namespaces that are saved and restored."""

import asyncio

import pytest

from drafter_service.server import namespaces as module
from drafter_service.server.namespace import ClosedError
from drafter_service.server.namespaces import MemoryLimitError
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import batch, start
from tests.drafter_service.server.opened_namespaces import (
    blocked_writes,
    draft_of,
    learned,
    opened,
    raising,
    saved,
)
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
        assert again.history.samples[0].time == 100.0
        assert again.restored_position == "12-3"
        # Text of a known name is not learned again.
        assert not again.learn(array([1, 2, 3, 9]), "a-0")


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
