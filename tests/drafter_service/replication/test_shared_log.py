"""Replicas that share a log in a real Redis learn and forget the same requests, once each."""

import asyncio
import itertools
import time
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from redis import Redis

from drafter_service.replication import redis_stream, shared_log
from drafter_service.replication.events import Event, Kind, decode
from drafter_service.replication.redis_stream import OLDEST, LogPosition, RedisStream, connect
from drafter_service.replication.replicated import ReplicatedNamespace
from drafter_service.replication.shared_log import NamespaceLog
from tests.drafter_service.guarded import run
from tests.drafter_service.replication.replica import TIMEOUT_S, eventually, forgotten, replicas, request
from tests.drafter_service.server.opened_namespaces import still_namespace
from tests.redis import running_redis

LONG = "a text longer than the queue"
PREFIXES = (f"test-{number}" for number in itertools.count())


@pytest.fixture(scope="module")
def server():
    with running_redis() as server:
        yield server


@pytest.fixture
def log(server):
    """Yield the URL and the prefix of a shared log, its key, and a direct client of its Redis."""
    prefix = next(PREFIXES)
    with Redis.from_url(server.url) as client:
        yield SimpleNamespace(url=server.url, client=client, prefix=prefix, key=f"ssd:{{{prefix}}}:namespace")


def replicas_of(log, number, **options):
    return replicas(log.url, number, prefix=log.prefix, **options)


@run
async def test_replicas_learn_the_same(log):
    """Each replica reads the events of the others in their order, and none of its own."""
    rng = np.random.default_rng(0)
    async with replicas_of(log, 3) as members:
        for member in members:
            member.read()
        published = [
            [request(f"{who}-{number}", *rng.integers(0, 1 << 20, rng.integers(1, 300))) for number in range(100)]
            for who in range(3)
        ]
        for number in range(100):
            for member, requests in zip(members, published, strict=True):
                member.log.publish(requests[number])
            await asyncio.sleep(0)
        for who, member in enumerate(members):
            await member.has(200)
            for other in range(3):
                theirs = [event for event in member.taken if event.request.startswith(f"{other}-")]
                expected = published[other] if other != who else []
                assert [(event.request, event.tokens.tolist(), event.time) for event in theirs] == [
                    (event.request, event.tokens.tolist(), event.time) for event in expected
                ]
        for member, requests in zip(members, published, strict=True):
            await member.log.flush()
            assert member.log.counters.published_tokens == sum(len(event.tokens) for event in requests)
        # Entries contain many requests.
        assert log.client.xlen(log.key) < 100


@run
async def test_namespaces_and_prefixes_are_isolated_and_empty_requests_not_published(log):
    async with (
        replicas_of(log, 2) as (one, two),
        replicas_of(log, 1, namespace="other") as (elsewhere,),
        replicas(log.url, 1, prefix=log.prefix + "2") as (other_prefix,),
    ):
        for member in (two, elsewhere, other_prefix):
            member.read()
        await one.publish(Event(Kind.FINISHED, 1.0, "empty"))
        assert not log.client.exists(log.key)
        await one.publish(request("a"))
        await elsewhere.publish(request("b"))
        await two.has(1)
        await elsewhere.has(0)
        await other_prefix.has(0)


@run
async def test_new_replica_reads_from_its_position(log):
    """The replica starts at the position stored with a snapshot."""
    async with replicas_of(log, 4) as (one, two, new, from_own):
        two.read()
        await one.publish(request("a"), request("b"))
        await two.has(2)
        position = str(two.reader.position)
        await one.publish(request("c"), request("d"))
        await two.publish(request("e"))
        new.read(LogPosition.parse(position))
        await new.has(3)
        assert new.names == ["c", "d", "e"]
        await eventually(lambda: two.reader.position == new.reader.position)
        # Own entries advance the position, too.
        await two.publish(request("f"))
        await eventually(lambda: two.reader.position > new.reader.position or new.names[-1] == "f")
        from_own.read(two.reader.position)
        await from_own.publish(request("g"))
        await new.has(5)
        await from_own.has(0)


@run
async def test_forgotten_text_is_not_learned_from_entries_that_are_read_or_written_later(log):
    client = connect(log.url)
    stream, text = RedisStream(client, log.prefix, "namespace"), np.ones(3, np.uint32)
    async with replicas_of(log, 1) as (other,):
        await other.publish(request("a"), request("b"))
        with still_namespace() as namespace:
            replicated = ReplicatedNamespace(namespace, stream, b"own-name", 1 << 30)
            namespace.forget("a")
            for _ in range(2):  # The second text is neither forgotten nor learned again when these are read.
                namespace.forget("own")
                namespace.learn(text, "own")
            await eventually(lambda: namespace.has_learned("b"))
            await other.publish(forgotten("b", 2.0), request("a"), request("b", time=1.9), request("c"))
            await eventually(lambda: namespace.has_learned("c"))
            assert [*map(namespace.has_learned, ["a", "b", "own"])] == [False, False, True]
            await other.publish(request("b", time=2.1))
            await eventually(lambda: namespace.has_learned("b"))
            assert (replicated.facts().duplicates, replicated.facts().consumed_tokens) == (0, 9)
            namespace.forget("late")
            namespace.forget_before(3.0)
            await replicated.close()
        # A namespace that is loaded again reads from the log what it had forgotten.
        with still_namespace() as namespace:
            replicated = ReplicatedNamespace(namespace, stream, b"own-name", 1 << 30)
            await other.publish(request("late", time=4.0), request("old", time=2.9), request("new", time=3.0))
            await eventually(lambda: namespace.has_learned("new"))
            assert not any(map(namespace.has_learned, ["a", "b", "late", "old"]))
            await replicated.close()
        # What it has learned since is newer than what its own entries forget.
        with still_namespace() as namespace:
            namespace.learn(text, "own")
            replicated = ReplicatedNamespace(namespace, stream, b"own-name", 1 << 30)
            await eventually(lambda: namespace.has_learned("new"))
            assert namespace.has_learned("own")
            await replicated.close()
    await client.aclose()


@pytest.mark.parametrize(
    ("kind", "age_s", "kept"),
    [
        (Kind.FORGOTTEN_BEFORE, 3600, 3),
        (Kind.FORGOTTEN_BEFORE, -3600, 1),
        (Kind.FORGOTTEN_BEFORE, -1e300, 1),
        (Kind.FORGOTTEN_BEFORE, 1e300, 3),
        (Kind.FORGOTTEN_BEFORE, 1e306, 3),
        (Kind.DROPPED, 3600, 1),
    ],
)
@run
async def test_forgotten_text_is_removed_from_redis(log, kind, age_s, kept):
    """The age of text is measured by the clock of Redis. The event that forgets is kept, with the rest of its entry."""
    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        await one.publish(request("b"), Event(kind, time.time() - age_s), request("c"))
        assert log.client.xlen(log.key) == kept
        two.read()
        await two.has(kept + 1)
        assert [event.kind for event in two.taken][-2:] == [kind, Kind.FINISHED]


@run
async def test_trimmed_position_is_a_gap(log):
    async with replicas_of(log, 3) as (one, two, new):
        two.read()
        for name in "abcd":
            await one.publish(request(name))
        await two.has(4)
        first, second = (LogPosition.parse(name.decode()) for name, _ in log.client.xrange(log.key, count=2))
        log.client.xtrim(log.key, maxlen=3, approximate=False)
        new.read(first)
        await new.has(3)
        assert new.names == ["b", "c", "d"]
        assert new.log.counters.gaps == 1
        # There is no gap from the oldest position, or from one that was not trimmed.
        for position in (OLDEST, second, two.reader.position):
            async with replicas_of(log, 1) as (other,):
                other.read(position)
                await eventually(lambda other=other: other.reader.position == two.reader.position)
                assert other.log.counters.gaps == 0


@run
async def test_reader_notices_trimming_beyond_its_position(log, monkeypatch):
    monkeypatch.setattr(shared_log, "LAG_INTERVAL_S", 0.0)
    monkeypatch.setattr(shared_log, "ENTRIES_AT_ONCE", 1)
    async with replicas_of(log, 2) as (one, two):
        two.read()
        two.may_take.clear()
        for name in "abcd":
            await one.publish(request(name))
        await eventually(lambda: two.names == ["a"])
        log.client.xtrim(log.key, maxlen=1, approximate=False)
        two.may_take.set()
        await two.has(2)
        assert two.names == ["a", "d"]
        assert two.log.counters.gaps == 1


@run
async def test_reader_continues_after_redis_lost_entries(log):
    """Redis may restart with an older state, or with a clock that was set back."""
    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        two.read(LogPosition(int((time.time() + 3600) * 1000), 0))
        await eventually(lambda: two.log.counters.gaps == 1)
        await one.publish(request("b"))
        await two.has(2)
        assert two.names == ["a", "b"]


@run
async def test_log_size_is_bounded(log, monkeypatch):
    monkeypatch.setattr(shared_log, "GATHER_S", 0.0)
    bound = 1 << 19
    async with replicas_of(log, 2, max_bytes=bound) as (one, two):
        rng = np.random.default_rng(0)
        used = []
        # A few large entries, many small ones, and large ones again.
        for entries, tokens in ((30, 10_000), (200, 500), (30, 10_000)):
            for number in range(entries):
                await one.publish(request(f"{entries}-{number}", *rng.integers(0, 50_000, tokens)))
                used.append(log.client.memory_usage(log.key, samples=0))
        assert max(used) < 1.1 * bound
        assert min(used[30:]) > 0.7 * bound
        two.read()
        await eventually(lambda: two.names[-1:] == ["30-29"])


@run
async def test_reader_waits_for_learning(log, monkeypatch):
    monkeypatch.setattr(shared_log, "ENTRIES_AT_ONCE", 2)
    monkeypatch.setattr(redis_stream, "BLOCK_S", 2 * TIMEOUT_S)
    monkeypatch.setattr(redis_stream, "TIMEOUT_S", 3 * TIMEOUT_S)
    async with replicas_of(log, 2) as (one, two):
        for number in range(10):
            await one.publish(request(str(number)))
        two.may_take.clear()
        two.read()
        await eventually(lambda: two.taken)
        position = two.reader.position
        reads = log.client.info("commandstats")["cmdstat_xread"]["calls"]
        # Publishing takes long enough for another read.
        await one.publish(request("10"))
        await one.publish(request("11"))
        assert two.names == ["0"]
        assert two.reader.position == position
        assert log.client.info("commandstats")["cmdstat_xread"]["calls"] == reads
        two.may_take.set()
        # A reader that is behind does not block in Redis, so this takes less than `BLOCK_S`.
        async with asyncio.timeout(TIMEOUT_S):
            await two.has(12)


@run
async def test_lag_is_reported(log):
    async with replicas_of(log, 3) as (one, two, three):
        two.read()
        await two.has(0)
        assert two.reader.lag_s == 0
        log.client.xadd(log.key, {"invalid": "entry"}, id="1000-0")
        log.client.xadd(log.key, {"invalid": "entry"}, id="9000-0")
        await one.publish(request("a"))
        for position in (OLDEST, LogPosition(1000, 0)):
            three.read(position)
            three.may_take.clear()
            await eventually(lambda: three.taken)
            assert three.reader.lag_s > time.time() - 100
            before = three.reader.lag_s
            await eventually(lambda before=before: three.reader.lag_s > before)
            three.may_take.set()
            await eventually(lambda: three.reader.lag_s == 0)
            three.taken.clear()
            await three.stop_reading()
        await eventually(lambda: two.reader.lag_s == 0)
        two.may_take.clear()
        await one.publish(request("b"))
        await eventually(lambda: two.reader.lag_s > 0)


@run
async def test_malformed_entries_are_skipped_and_counted(log):
    rng = np.random.default_rng(0)
    async with replicas_of(log, 2) as (one, two):
        two.read()
        await one.publish(request("a"))
        good = dict(log.client.xrange(log.key)[0][1])
        for _ in range(50):
            name = list(good)[rng.integers(len(good))]
            log.client.xadd(log.key, {**good, name: rng.bytes(rng.integers(1, 40)), b"version": b"1"})
        log.client.xadd(log.key, {b"unknown": b"field"})
        log.client.xadd(log.key, {**good, b"version": b"2"})
        await one.publish(request("z"))
        await eventually(lambda: "z" in two.names)
        assert two.log.counters.malformed >= 2


@run
async def test_an_entry_is_passed_again_after_an_exception_of_the_consumer(log, monkeypatch):
    monkeypatch.setattr(redis_stream, "FIRST_PAUSE_S", 0.001)
    attempts = []

    async def take(entry):
        attempts.append((reader.is_connected, reader.position))
        if len(attempts) < 4:
            raise MemoryError

    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        reader = two.new_reader()
        with structlog.testing.capture_logs() as logged:
            reading = asyncio.create_task(reader.run(take))
            await eventually(lambda: reader.position != OLDEST)
        reading.cancel()
        assert attempts == [(True, OLDEST), *[(False, OLDEST)] * 3]
        assert reader.is_connected
        events = [(line["event"], line["log_level"]) for line in logged]
        assert events == [*[("shared_log_task_failed", "error")] * 3, ("shared_log_available", "info")]


@run
async def test_publishing_goes_on_after_an_exception(log, monkeypatch):
    monkeypatch.setattr(redis_stream, "FIRST_PAUSE_S", 0.001)
    encode, failed = shared_log.encode, []

    def fail_twice(*arguments):
        if len(failed) < 2:
            failed.append(one.log.is_connected)
            raise MemoryError
        return encode(*arguments)

    monkeypatch.setattr(shared_log, "encode", fail_twice)
    async with replicas_of(log, 2) as (one, two):
        two.read()
        await one.publish(request("a"), request("b"))
        await two.has(2)
        assert failed == [True, False]
        assert one.log.is_connected


@run
async def test_reader_can_be_cancelled(log, monkeypatch):
    """A reader can be cancelled at any await."""
    monkeypatch.setattr(shared_log, "LAG_INTERVAL_S", 0.0)
    async with replicas_of(log, 1) as (one,):
        for number in range(40):
            await one.publish(request(str(number)))
        for turns in range(0, 300, 10):
            async with replicas_of(log, 1) as (replica,):
                replica.read()
                for _ in range(turns):
                    await asyncio.sleep(0)
                async with asyncio.timeout(TIMEOUT_S):
                    await replica.stop_reading()


@given(st.lists(st.sampled_from([*Kind, LONG]), min_size=30, max_size=300), st.integers(1, 20))
@settings(max_examples=30)
def test_waiting_events_keep_their_order_and_are_bounded(kinds, room):
    """The oldest requests are dropped, and those that are longer than the queue; commands to forget everything before a
    time begin entries.
    """
    published, allowed = [], asyncio.Event()

    class Stream:
        async def add(self, entries):
            await allowed.wait()
            published.extend(decode(entry).events for entry in entries)
            return [OLDEST] * len(entries)

        async def trim_before(self, moment, position):
            pass

        async def trim(self, max_bytes):
            pass

    async def run():
        own = NamespaceLog(Stream(), structlog.get_logger(), name=b"own", max_bytes=1 << 20)
        for number, kind in enumerate(kinds):
            size = {Kind.FINISHED: 1, LONG: 2000}.get(kind, 0)
            tokens = np.full(size, number, np.uint32)
            own.publish(Event(Kind.FINISHED if kind is LONG else kind, float(number), tokens=tokens))
            tokens[:] = 0  # They are copied.
        allowed.set()
        await own.close()
        return own.counters.dropped_tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shared_log, "GATHER_S", 0.0)
        patch.setattr(shared_log, "QUEUE_TOKENS", room * (1 + shared_log.EVENT_WEIGHT))
        dropped = asyncio.run(run())
    requests = [number for number, kind in enumerate(kinds) if kind is Kind.FINISHED]
    overflowing = max(0, len(requests) - room)
    assert dropped == overflowing + 2000 * kinds.count(LONG)
    lost = {*requests[:overflowing], *(number for number, kind in enumerate(kinds) if kind is LONG)}
    assert [event.time for entry in published for event in entry] == [n for n in range(len(kinds)) if n not in lost]
    assert all(event.tokens.tolist() == [event.time] for each in published for event in each if len(event.tokens))
    for entry in published:
        assert 0 < len(entry) <= shared_log.ENTRY_EVENTS
        assert not any(event.kind in (Kind.FORGOTTEN_BEFORE, Kind.DROPPED) for event in entry[1:])
