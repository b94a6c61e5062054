"""Stored namespaces that cannot be loaded now: their files stay, callers are told, and it is tried again."""

import asyncio
import errno
import os
import struct
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from drafter_service.server import disk
from drafter_service.server import namespaces as module
from drafter_service.server.disk import DiskThreads, LoadError
from ssd.corpus import sections, snapshot
from ssd.corpus.corpus import Corpus
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import counted
from tests.drafter_service.server.opened_namespaces import (
    UNKNOWN_MODEL,
    contents,
    draft_of,
    learned,
    limit_disk,
    opened,
    raising,
    saved,
)

PASSING = [errno.EMFILE, errno.ENFILE, errno.EIO, errno.EACCES, errno.ENOMEM, errno.ESTALE, errno.EINTR, errno.EROFS]


EIO = OSError(errno.EIO, "Input/output error")


@pytest.mark.parametrize(
    ("where", "what", "problem"),
    [(Path, "open", OSError(code, os.strerror(code))) for code in PASSING]
    + [(Path, "read_bytes", EIO), (Path, "stat", EIO), (sections, "_read_section", EIO)]
    + [(sections, "_read_section", MemoryError()), (snapshot, "Corpus", MemoryError())]
    + [(threading.Thread, "start", RuntimeError("no more threads"))],
    ids=repr,
)
@run
async def test_a_passing_error_leaves_the_files_and_reaches_the_caller(tmp_path, monkeypatch, where, what, problem):
    monkeypatch.setattr(module, "RETRY_S", 0.0)
    before = await saved(tmp_path)
    async with opened(tmp_path) as namespaces:
        for _ in range(3):
            with monkeypatch.context() as patch:
                patch.setattr(where, what, raising(problem))
                with pytest.raises(LoadError, match="not ready: namespace 'a' cannot be loaded now: "):
                    await learned(namespaces, "a", [5, 6, 7, 8])
        assert (namespaces.failed_loads, namespaces.loaded, namespaces._reserved) == (3, {}, {})
        await namespaces.save_changed()
        assert contents(tmp_path) == before
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]


@run
async def test_attempts_to_load_do_not_unload_others_again_and_again(tmp_path, monkeypatch):
    now = 1e9
    monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now, time=time.time))
    await saved(tmp_path)
    async with opened(tmp_path, fit=1) as namespaces:
        with monkeypatch.context() as patch:
            patch.setattr(Path, "open", raising(EIO))
            with pytest.raises(LoadError, match="Input/output error"):
                await learned(namespaces, "a")
        idle = await learned(namespaces, "b", [1, 2])
        for _ in range(3):
            with pytest.raises(LoadError, match=r"Input/output error; it is tried again in 5\.0 s"):
                await learned(namespaces, "a")
        assert (namespaces.loaded, namespaces.failed_loads) == ({"b": idle}, 1)
        now += module.RETRY_S
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]


def other_version(data):
    return data[:8] + struct.pack("<I", 2) + data[12:]


@pytest.mark.parametrize("has_other_depth", [False, True])
@run
async def test_a_snapshot_of_another_version_or_depth_is_left_alone(tmp_path, has_other_depth, monkeypatch):
    await saved(tmp_path)
    path = tmp_path / "a" / "corpus.ssd"
    if has_other_depth:
        load = snapshot.load
        load_deeper = lambda path, capacity, depth, **given: load(path, capacity, depth + 1, **given)  # noqa: E731
        monkeypatch.setattr(snapshot, "load", load_deeper)
    else:
        path.write_bytes(other_version(path.read_bytes()))
    before = contents(tmp_path)
    async with opened(tmp_path) as namespaces:
        with pytest.raises(LoadError, match=r"set match_depth to" if has_other_depth else r"has format 2"):
            await learned(namespaces, "a")
        assert contents(tmp_path) == before
        # It can be dropped all the same.
        assert await namespaces.drop("a")
        assert contents(tmp_path) == {}
        assert (await learned(namespaces, "a")).corpus.tokens == 0


@run
async def test_a_snapshot_with_more_tokens_than_the_capacity_is_trimmed_only_by_request(tmp_path):
    before = await saved(tmp_path, counted(0, 4500))
    for capacity, trim in ((4500, True), (4501, False)):
        async with opened(tmp_path, trim=trim, capacities={"a": capacity}) as namespaces:
            assert draft_of(await learned(namespaces, "a"), counted(4480, 8), 1) == [4488]
    async with opened(tmp_path, capacities={"a": 4500}) as namespaces:
        with pytest.raises(LoadError, match=r"has 4,501 tokens, and the capacity is 4,500; .* or snapshots.trim"):
            await learned(namespaces, "a")
        await namespaces.save_changed()
    assert contents(tmp_path) == before


def blocked_loads(monkeypatch):
    """Block loading until the returned event is set; the returned list has the names of the files."""
    may_load, begun, load = threading.Event(), [], snapshot.load

    def waits(path, *given, **options):
        begun.append(path.parent.name)
        may_load.wait(60)
        return load(path, *given, **options)

    monkeypatch.setattr(snapshot, "load", waits)
    return may_load, begun


@run
async def test_a_cancelled_load_keeps_its_reservation_and_the_next_caller_waits_for_it(tmp_path, monkeypatch):
    may_load, begun = blocked_loads(monkeypatch)
    await saved(tmp_path)
    async with opened(tmp_path, fit=1) as namespaces:
        for _ in range(40):
            impatient = asyncio.create_task(learned(namespaces, "a"))
            while not begun:
                await asyncio.sleep(0.001)
            impatient.cancel()
            await asyncio.wait([impatient])
            assert impatient.cancelled()
            assert len(namespaces._reserved) == 1
        # Its memory is not available to others.
        with pytest.raises(module.MemoryLimitError):
            await learned(namespaces, "b")
        patient = asyncio.create_task(learned(namespaces, "a"))
        await asyncio.sleep(0.05)
        assert not patient.done()
        may_load.set()
        assert draft_of(await patient, [1, 2, 3], 1) == [4]
        assert begun == ["a"]


@run
async def test_a_caller_does_not_wait_longer_than_the_limit_for_a_load_or_the_folder(tmp_path, monkeypatch):
    await saved(tmp_path)
    may_load, begun = blocked_loads(monkeypatch)
    limit_disk(monkeypatch, 0.05)
    async with opened(tmp_path) as namespaces:
        for _ in range(3):
            with pytest.raises(LoadError, match="it takes longer than"):
                await learned(namespaces, "a")
        assert namespaces.failed_loads == 3
        while not begun:
            await asyncio.sleep(0.001)
        limit_disk(monkeypatch, 1.0)  # The folder must answer.
        with pytest.raises(module.SnapshotError, match="are being read or written, so nothing was deleted"):
            await namespaces.drop("a")
        assert begun == ["a"]
        # Others are served meanwhile.
        limit_disk(monkeypatch, 60)
        assert (await learned(namespaces, "b", [1, 2])).corpus.tokens == 3
        names = namespaces.store.names
        namespaces.store.names = may_load.wait
        limit_disk(monkeypatch, 0.05)
        with pytest.raises(LoadError, match="the snapshot folder cannot be loaded now: it does not answer"):
            await namespaces.names()
        namespaces.store.names = names
        limit_disk(monkeypatch, 60)
        may_load.set()
        while "a" not in namespaces.loaded:
            await asyncio.sleep(0.001)
        assert draft_of(await learned(namespaces, "a"), [1, 2, 3], 1) == [4]


@run
async def test_the_number_of_threads_of_a_disk_that_hangs_is_limited(monkeypatch):
    go_on = threading.Event()
    monkeypatch.setattr(disk, "MAX_THREADS", 3)
    threads = DiskThreads()
    hanging = [threads.run(go_on.wait, 60) for _ in range(3)]
    with pytest.raises(RuntimeError, match="3 calls of the file system have not returned"):
        threads.run(go_on.wait)
    go_on.set()
    await asyncio.gather(*hanging)
    assert await threads.run(str, 5) == "5"


@run
async def test_the_log_of_requests_is_read_in_the_thread_that_loads_it(tmp_path, monkeypatch):
    await saved(tmp_path, [1, 2, 3], [4, 5, 6])
    readers, read = [], Corpus.request_times

    def request_times(corpus):
        readers.append(threading.current_thread())
        return read(corpus)

    monkeypatch.setattr(Corpus, "request_times", request_times)
    async with opened(tmp_path) as namespaces, namespaces.use("a", UNKNOWN_MODEL) as namespace:
        assert [namespace.has_learned(f"a-{number}") for number in range(3)] == [True, True, False]
    [reader] = readers
    assert reader is not threading.current_thread()
