"""Namespaces: made, restored, saved, unloaded and dropped, within a memory limit."""

import asyncio
import threading
from contextlib import AsyncExitStack, asynccontextmanager

import numpy as np
import pytest

from drafter_service.observability.facts import ModelIdentity
from drafter_service.replication.events import Dropped, Finished, Forgotten, ForgottenBefore
from drafter_service.server import namespaces as module
from drafter_service.server.namespace import ClosedError, IdentityError, Namespace, StreamHandle
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError, Namespaces, max_bytes
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits, NamespacesConfig, ServiceConfig, SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from ssd.corpus.sections import SnapshotError
from ssd.errors import UserError
from tests.drafter_service.guarded import Clock, run
from tests.drafter_service.raw import batch, drafted, start
from tests.strategies import array

DRAFTING = DrafterConfig(capacity=5000, refresh_interval_s=0.001)
UNKNOWN_MODEL = ModelIdentity()
LLAMA = ModelIdentity("llama", "tokenizer-a", "", 100)


def config_of(folder=None, *, fit=10, **changes):
    """Return a configuration; fit: number of namespaces within the memory limit."""
    limit = fit * max_bytes(DRAFTING.capacity)
    return ServiceConfig(
        drafting=DRAFTING,
        namespaces=NamespacesConfig(memory_limit=limit, **changes),
        snapshots=SnapshotsConfig(folder=folder),
    )


@asynccontextmanager
async def opened(folder=None, **changes):
    namespaces = Namespaces(config_of(folder, **changes))
    try:
        async with asyncio.timeout(60):
            yield namespaces
    finally:
        for namespace in list(namespaces.loaded.values()):
            await namespaces._unload(namespace)


async def learned(namespaces, name, *texts):
    """Return a namespace after it has learned some texts."""
    async with namespaces.use(name, UNKNOWN_MODEL) as namespace:
        for number, text in enumerate(texts):
            namespace.learn(array(text), f"{name}-{number}")
        await asyncio.to_thread(namespace.corpus.refresh)
    return namespace


def draft_of(namespace, context, limit=3):
    session = Session(namespace, Limits())
    request = pb.DraftRequest(starts=[start(1, context, learn=False)], batch=batch({1: ()}, limit))
    tokens = drafted(session.answer(request, may_learn=True))
    session.close()
    return tokens


@run
async def test_namespaces_are_made_on_first_use_and_are_isolated():
    async with opened() as namespaces:
        assert namespaces.names() == []
        first = await learned(namespaces, "a", [1, 2, 3, 4])
        second = await learned(namespaces, "b", [1, 2, 3, 5], [9, 1, 2, 3, 5])
        assert namespaces.names() == ["a", "b"]
        assert draft_of(first, [1, 2, 3], 1) == [4]
        assert draft_of(second, [1, 2, 3], 1) == [5]
        third = await learned(namespaces, "c")
        assert draft_of(third, [1, 2, 3], 1) == []
        session = Session(first, Limits())
        request = pb.DraftRequest(starts=[start(1, [1, 2])], batch=batch({1: [3, 4]}))
        session.answer(request, may_learn=True)
        assert [each.stats.committed for each in (first, second, third)] == [2, 0, 0]
        # Running sequences are isolated, too.
        assert draft_of(second, [3, 4], 1) == []
        async with namespaces.use("a", UNKNOWN_MODEL) as again:
            assert again is first


@run
async def test_concurrent_callers_get_the_same_namespace():
    async with opened() as namespaces:

        async def used():
            async with namespaces.use("a", UNKNOWN_MODEL) as namespace:
                return namespace

        first, *others = await asyncio.gather(*(used() for _ in range(10)))
        assert all(other is first for other in others)


@pytest.mark.parametrize("name", ["../x", "..", "", "/tmp/x"])
def test_a_name_that_could_be_a_path_is_refused(tmp_path, name):
    async def test():
        async with opened(tmp_path / "snapshots") as namespaces:
            with pytest.raises(NamespaceError, match="a namespace cannot be called"):
                async with namespaces.use(name, UNKNOWN_MODEL):
                    pass
            assert namespaces.names() == []

    asyncio.run(test())
    assert [path.name for path in tmp_path.rglob("*")] == ["snapshots"]


@run
async def test_without_permission_to_create_namespaces_only_existing_ones_are_used(tmp_path):
    async with opened(tmp_path) as namespaces:
        await namespaces.save(await learned(namespaces, "on-disk", [1, 2, 3, 4]))
    async with opened(tmp_path, create=False, capacities={"configured": 6000}) as namespaces:
        with pytest.raises(NamespaceError, match="there is no namespace 'new', and clients may not create any"):
            await learned(namespaces, "new")
        assert draft_of(await learned(namespaces, "on-disk"), [1, 2, 3], 1) == [4]
        assert (await learned(namespaces, "configured")).corpus.capacity == 6000


@run
async def test_a_client_with_another_vocabulary_is_refused(tmp_path):
    async with opened(tmp_path) as namespaces:

        async def use(model):
            async with namespaces.use("a", model) as namespace:
                return namespace.model

        assert await use(ModelIdentity("llama")) == ModelIdentity("llama")
        assert await use(LLAMA) == LLAMA
        for other, message in (
            (ModelIdentity("llama", "tokenizer-b", "", 100), "belongs to another tokenizer"),
            (ModelIdentity("llama", "tokenizer-a", "", 101), "has a vocabulary of 100 tokens, not 101"),
        ):
            with pytest.raises(IdentityError, match=message):
                await use(other)
        # A client without a model is served, and so is another model with the same vocabulary.
        assert await use(UNKNOWN_MODEL) == await use(ModelIdentity("other", "tokenizer-a")) == LLAMA
        assert namespaces.loaded["a"].active_calls == 0
        await namespaces.save(namespaces.loaded["a"])
    async with opened(tmp_path) as namespaces:
        with pytest.raises(IdentityError, match="belongs to another tokenizer"):
            await use(ModelIdentity("llama", "tokenizer-b"))


@run
async def test_a_saved_namespace_is_restored_after_a_restart(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        session = Session(namespace, Limits())
        session.answer(pb.DraftRequest(starts=[start(1, [1])], batch=batch({1: [2, 3]})), may_learn=True)
        namespace.clients.timeouts = 5
        namespace.learn(array([7]), "a-0")
        namespace.note_sample(100.0)
        namespace.log_position = lambda: "12-3"
        assert namespace.is_changed
        await namespaces.close()
    async with opened(tmp_path) as namespaces:
        again = await learned(namespaces, "a")
        assert not again.is_changed
        assert draft_of(again, [1, 2, 3], 1) == [4]
        assert (again.stats.committed, again.clients.timeouts, again.duplicates) == (2, 5, 1)
        assert again.history.samples[0].time == 100.0
        assert again.restored_position == again.log_position() == "12-3"
        # Text of a known name is not learned again.
        assert not again.learn(array([1, 2, 3, 9]), "a-0")


@run
async def test_the_longest_idle_namespace_is_unloaded_and_restored(tmp_path):
    async with opened(tmp_path, fit=2) as namespaces:
        for name, last in (("a", 4), ("b", 5), ("c", 6)):
            await learned(namespaces, name, [1, 2, 3, last])
        assert sorted(namespaces.loaded) == ["b", "c"]
        assert namespaces.names() == ["a", "b", "c"]
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]
        assert sorted(namespaces.loaded) == ["a", "c"]
        assert draft_of(await learned(namespaces, "b"), [1, 2, 3], 1) == [5]


@run
async def test_namespaces_in_use_are_not_unloaded(tmp_path):
    async with opened(tmp_path, fit=2) as namespaces, AsyncExitStack() as stack:
        # A call uses one namespace, and a stream uses the other.
        first = await stack.enter_async_context(namespaces.use("a", UNKNOWN_MODEL))
        session = Session(await learned(namespaces, "b"), Limits())
        with pytest.raises(MemoryLimitError, match="'c' needs up to 25,075,000 bytes; 50,150,000 of the limit"):
            await learned(namespaces, "c")
        assert sorted(namespaces.loaded) == ["a", "b"]
        assert first is namespaces.loaded["a"]
        session.close()
        await learned(namespaces, "c")
        assert sorted(namespaces.loaded) == ["a", "c"]


@run
async def test_without_a_folder_no_namespace_is_unloaded():
    async with opened(fit=1) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        with pytest.raises(MemoryLimitError):
            await learned(namespaces, "b")
        assert draft_of(namespace, [1, 2, 3], 1) == [4]
        with pytest.raises(SnapshotError, match="there is no snapshot folder; start the service with"):
            await namespaces.save(namespace)


def test_memory_limit_below_one_namespace_is_refused():
    with pytest.raises(
        UserError, match=r"namespaces.memory_limit: 12,537,500 bytes are too few .* which needs 25,075,000"
    ):
        Namespaces(ServiceConfig(drafting=DRAFTING, namespaces=NamespacesConfig(memory_limit=12_537_500)))


def blocked_writes(monkeypatch):
    """Block the writing of snapshots until the returned event is set; the returned semaphore counts attempts."""
    may_write, begun = threading.Event(), threading.Semaphore(0)
    write = module._write

    def waits(*arguments):
        begun.release()
        may_write.wait(60)
        return write(*arguments)

    monkeypatch.setattr(module, "_write", waits)
    return may_write, begun


def test_a_namespace_that_cannot_be_saved_stays_loaded_and_is_counted(tmp_path, monkeypatch):
    def fails(*_):
        raise OSError(28, "No space left on device")

    async def test():
        async with opened(tmp_path, fit=1) as namespaces:
            namespace = await learned(namespaces, "a", [1, 2, 3, 4])
            await namespaces.save(namespace)
            namespace.learn(array([1, 2, 3, 9, 9]), None)
            with monkeypatch.context() as patch:
                patch.setattr(module, "_write", fails)
                with pytest.raises(MemoryLimitError, match=r"no idle namespace can be saved .* No space left"):
                    await learned(namespaces, "b")
                await namespaces.unload_idle(0)
                await namespaces.save_changed()
            assert namespaces.failed_saves == 3
            assert namespaces.loaded == {"a": namespace}
            assert namespace.is_changed
            await namespaces.save_changed()
            assert not namespace.is_changed

    asyncio.run(test())


@pytest.mark.parametrize("has_folder", [False, True])
def test_memory_of_namespaces_that_cannot_be_unloaded(tmp_path, has_folder):
    async def test():
        async with opened(tmp_path if has_folder else None, fit=3) as namespaces:
            await learned(namespaces, "a", [1, 2])
            async with namespaces.use("b", UNKNOWN_MODEL):
                used = namespaces.unevictable_bytes
            size = max_bytes(DRAFTING.capacity)
            assert used == (size if has_folder else 2 * size)
            assert namespaces.unevictable_bytes == (0 if has_folder else 2 * size)

    asyncio.run(test())


def test_a_save_continues_when_its_caller_is_cancelled_and_the_next_one_waits(tmp_path, monkeypatch):
    """Otherwise the older of two snapshots could replace the newer one."""
    may_write, begun = blocked_writes(monkeypatch)

    async def test():
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

    asyncio.run(test())


def test_waiting_for_memory_does_not_deadlock(tmp_path, monkeypatch):
    """A namespace is requested while it is being unloaded, and a third namespace needs its memory."""
    may_write, begun = blocked_writes(monkeypatch)

    async def test():
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

    asyncio.run(test())


@run
async def test_idle_namespaces_are_unloaded(tmp_path):
    async with opened(tmp_path) as namespaces, AsyncExitStack() as stack:
        idle = await learned(namespaces, "idle", [1, 2, 3, 4])
        await stack.enter_async_context(namespaces.use("held", UNKNOWN_MODEL))
        session = Session(await learned(namespaces, "drafting"), Limits())
        await namespaces.unload_idle(3600)
        assert len(namespaces.loaded) == 3
        await namespaces.unload_idle(0)
        assert sorted(namespaces.loaded) == ["drafting", "held"]
        assert idle.is_closed
        session.close()


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
    async with opened(tmp_path) as namespaces:
        await namespaces.save(await learned(namespaces, "a", [1, 2, 3, 4]))
    (tmp_path / "a" / "namespace.json").unlink()
    async with opened(tmp_path, create=False) as namespaces:
        assert namespaces.names() == ["a"]
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]
        assert await namespaces.drop("a")
        assert list(tmp_path.iterdir()) == []


@run
async def test_a_dropped_namespace_is_deleted_from_memory_and_disk(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        published = []
        namespace.publish = published.append
        await namespaces.save(namespace)
        stream = asyncio.create_task(asyncio.Event().wait())
        namespace.streams.add(StreamHandle(stream))
        assert await namespaces.drop("a")
        assert [type(event) for event in published] == [Dropped]
        await asyncio.wait([stream])
        assert stream.cancelled()
        assert namespaces.names() == []
        assert list(tmp_path.iterdir()) == []
        assert not await namespaces.drop("a")
        again = await learned(namespaces, "a")
        assert again.corpus.tokens == 0
        with pytest.raises(ClosedError, match="namespace 'a' was dropped"):
            await namespaces.save(namespace)


def test_a_waiting_save_does_not_restore_a_dropped_namespace(tmp_path, monkeypatch):
    may_write, begun = blocked_writes(monkeypatch)

    async def test():
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

    asyncio.run(test())


@run
async def test_files_that_cannot_be_deleted_are_reported(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        await namespaces.save(namespace)

        def stays(_):
            raise PermissionError(13, "Permission denied")

        namespaces.store.delete = stays
        with pytest.raises(SnapshotError, match=r"files of namespace 'a' cannot be deleted: .*Permission denied"):
            await namespaces.drop("a")
        assert namespaces.loaded == {}


@run
async def test_refused_names_use_no_memory():
    async with opened(create=False) as namespaces:
        for number in range(100):
            with pytest.raises(NamespaceError):
                await learned(namespaces, f"name-{number}")
        assert len(namespaces._loading) == 0
        assert namespaces._reserved == {}


@pytest.fixture
def clock():
    clock = Clock()
    clock.now = 1000.0
    return clock


@pytest.fixture
def namespace(clock):
    namespace = Namespace("some", UNKNOWN_MODEL, DRAFTING, Corpus(DRAFTING.capacity, DRAFTING.match_depth, clock))
    yield namespace
    namespace.close()
    namespace.corpus.close()


def test_a_name_is_learned_once_until_it_is_forgotten(namespace, clock):
    published = []
    namespace.publish = published.append
    assert namespace.learn(array([1, 2, 3, 4]), "r")
    assert not namespace.learn(array([1, 2, 3, 5]), "r")
    assert namespace.learn(array([5, 6, 7, 8]), None)
    assert namespace.learn(array([5, 6, 7, 8]), None)
    assert namespace.duplicates == 1
    namespace.forget("r")
    namespace.corpus.refresh()
    assert draft_of(namespace, [1, 2, 3], 1) == []
    assert namespace.learn(array([1, 2, 3, 9]), "r")
    namespace.corpus.refresh()
    assert draft_of(namespace, [1, 2, 3], 1) == [9]
    clock.now += 10
    assert namespace.learn(array([4, 4, 5]), "s")
    namespace.forget_before(clock.now)
    namespace.corpus.refresh()
    assert namespace.learn(array([1, 2, 3, 7]), "r")
    assert not namespace.learn(array([4, 4, 5]), "s")
    kinds = [Finished, Finished, Finished, Forgotten, Finished, Finished, ForgottenBefore, Finished]
    assert [type(event) for event in published] == kinds


def test_text_from_the_log_has_its_time_and_is_not_published_again(namespace, clock):
    published = []
    namespace.publish = published.append
    assert namespace.learn(array([1, 2, 3, 4]), "r", logged_at=clock.now - 10)
    assert not namespace.learn(array([1, 2, 3, 4]), "r", logged_at=clock.now)
    namespace.forget_before(clock.now - 5, is_from_log=True)
    namespace.corpus.refresh()
    assert namespace.corpus.requests == 0
    assert namespace.learn(array([1, 2, 3, 4]), "r", logged_at=clock.now)
    namespace.forget("r", is_from_log=True)
    namespace.corpus.refresh()
    assert namespace.corpus.requests == 0
    assert published == []


def test_the_number_of_remembered_names_is_bounded(namespace, monkeypatch):
    monkeypatch.setattr("drafter_service.server.namespace.MAX_NAMES", 80)
    nothing = np.empty(0, np.uint32)
    for number in range(1000):
        namespace.learn(nothing, f"{number}")
        assert len(namespace.learned_names()) <= 80
    assert not namespace.learn(nothing, "930")
    assert namespace.learn(nothing, "0")


def test_everything_is_forgotten_after_the_clock_was_set_back(namespace, clock):
    """The clock was a day ahead when the text was learned."""
    for now, text in ((1000.0, [1, 2, 3, 4]), (90_000.0, [5, 6, 7, 8]), (1001.0, [2, 4, 6, 8])):
        clock.now = now
        namespace.learn(array(text), str(now))
    namespace.forget_before(float("inf"))
    namespace.corpus.refresh()
    assert namespace.corpus.requests == 0
    assert [draft_of(namespace, context, 1) for context in ([1, 2, 3], [5, 6, 7], [2, 4, 6])] == [[], [], []]
    assert namespace.learn(array([1, 2, 3, 4]), "1000.0")


def test_ages_are_measured_with_the_current_clock(namespace, clock):
    for now, text in ((1000.0, [1, 2, 3, 4]), (2000.0, [15, 16, 17, 18]), (1500.0, [22, 24, 26, 28])):
        clock.now = now
        namespace.learn(array(text), None)
    namespace.forget_before(1600.0)
    namespace.corpus.refresh()
    assert [draft_of(namespace, context, 1) for context in ([1, 2, 3], [15, 16, 17], [22, 24, 26])] == [[], [18], []]
    # After it is set back, nothing is older than the epoch.
    clock.now = 10.0
    namespace.forget_before(clock.now - 100)
    namespace.corpus.refresh()
    assert draft_of(namespace, [15, 16, 17], 1) == [18]


def test_the_time_in_the_shared_log_is_finite(namespace, clock):
    published = []
    namespace.publish = published.append
    namespace.forget_before(float("inf"))
    namespace.forget_before(5.0)
    assert [event.time for event in published] == [clock.now, 5.0]


def test_a_used_namespace_is_not_idle(namespace):
    assert namespace.is_idle
    session = Session(namespace, Limits())
    assert not namespace.is_idle
    session.close()
    assert namespace.is_idle
