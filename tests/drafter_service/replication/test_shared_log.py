"""Replicas that share a log in a real Redis learn and forget the same requests, once each."""

import asyncio
import itertools
import time
from dataclasses import dataclass

import numpy as np
import pytest
from redis import Redis

from drafter_service.replication import reader, redis_stream, shared_log
from drafter_service.replication.events import Dropped, Finished, Forgotten, ForgottenBefore
from drafter_service.replication.redis_stream import OLDEST, LogPosition
from drafter_service.replication.replicas import BYTES_PER_TOKEN, Replication
from drafter_service.settings.tree import LogConfig
from ssd.corpus.requests import hash_of
from tests.drafter_service.replication.replica import Replica, eventually, in_loop, replicas, request
from tests.redis import running_redis

PREFIXES = (f"test-{number}" for number in itertools.count())


@dataclass(frozen=True)
class Log:
    """A shared log, and a direct client of its Redis."""

    url: str
    client: Redis
    prefix: str
    key: str


@pytest.fixture(scope="module")
def server():
    with running_redis() as server:
        yield server


@pytest.fixture
def log(server):
    prefix = next(PREFIXES)
    with Redis.from_url(server.url) as client:
        yield Log(server.url, client, prefix, f"ssd:{{{prefix}}}:namespace")


def replicas_of(log, number, **options):
    return replicas(log.url, number, prefix=log.prefix, **options)


@in_loop
async def test_replicas_learn_the_same(log):
    """Each replica reads the events of the others in their order, and none of its own."""
    rng = np.random.default_rng(0)
    async with replicas_of(log, 3) as members:
        for member in members:
            member.read()
        published = [
            [request(f"{who}-{number}", *rng.integers(0, 1 << 20, rng.integers(1, 300))) for number in range(400)]
            for who in range(3)
        ]
        for number in range(400):
            for member, requests in zip(members, published, strict=True):
                member.log.publish(requests[number])
            await asyncio.sleep(0)
        for who, member in enumerate(members):
            await member.has(800)
            for other in range(3):
                theirs = [event for event in member.taken if event.request.startswith(f"{other}-")]
                expected = published[other] if other != who else []
                assert [(event.request, event.tokens.tolist(), event.time) for event in theirs] == [
                    (event.request, event.tokens.tolist(), event.time) for event in expected
                ]
        for member, requests in zip(members, published, strict=True):
            await member.log.flush()
            assert member.log.counters.published_tokens == sum(len(event.tokens) for event in requests)
            assert member.log.counters.consumed_tokens == sum(len(event.tokens) for event in member.taken)
        # Entries contain many requests.
        assert log.client.xlen(log.key) < 200


@in_loop
async def test_namespaces_and_prefixes_are_isolated(log):
    async with (
        replicas_of(log, 2) as (one, two),
        replicas_of(log, 1, namespace="other") as (elsewhere,),
        replicas(log.url, 1, prefix=log.prefix + "2") as (other_prefix,),
    ):
        for member in (two, elsewhere, other_prefix):
            member.read()
        await one.publish(request("a"))
        await elsewhere.publish(request("b"))
        await two.has(1)
        await elsewhere.has(0)
        await other_prefix.has(0)


@in_loop
async def test_request_published_by_several_replicas_is_learned_once(log):
    async with replicas_of(log, 3) as (one, two, three):
        await one.publish(request("a"), request(""))
        await two.publish(request("a"), request(""), request("b"))
        three.read()
        await three.has(4)
        assert three.names == ["a", "", "", "b"]
        assert three.log.counters.duplicates == 1


@in_loop
async def test_empty_requests_are_not_published(log):
    async with replicas_of(log, 1) as (one,):
        await one.publish(Finished("a", np.empty(0, np.uint32), 1.0))
        assert not log.client.exists(log.key)


@in_loop
async def test_new_replica_reads_from_its_position(log):
    """The replica starts at the position stored with a snapshot, and skips requests that the snapshot contains."""
    async with replicas_of(log, 4) as (one, two, new, from_own):
        two.read()
        await one.publish(request("a"), request("b"))
        await two.has(2)
        position = str(two.reader.position)
        # A snapshot with this position may contain later requests.
        await one.publish(request("c"), request("d"))
        await two.publish(request("e"))
        new.read(LogPosition.parse(position), known=[hash_of("a"), hash_of("c")])
        await new.has(2)
        assert new.names == ["d", "e"]
        await eventually(lambda: two.reader.position == new.reader.position)
        # Own entries advance the position, too.
        await two.publish(request("f"))
        await eventually(lambda: two.reader.position > new.reader.position or new.names == ["d", "e", "f"])
        from_own.read(two.reader.position)
        await from_own.publish(request("g"))
        await new.has(4)
        await from_own.has(0)


@in_loop
async def test_restarted_replica_reads_its_own_earlier_entries(log):
    """The replica's snapshot may be older than the entries that it published."""
    async with replicas_of(log, 1) as (before,):
        await before.publish(request("a"))
    async with replicas_of(log, 1) as (after,):
        after.read()
        await after.has(1)


@in_loop
async def test_order_of_forgetting_and_learning_is_kept(log):
    async with replicas_of(log, 2) as (one, two):
        two.read()
        await one.publish(request("a"), Forgotten("a", 2.0), request("a", time=3.0), request("b", time=3.0))
        await two.has(4)
        assert [(type(event), event.time) for event in two.taken] == [
            (Finished, 1.0),
            (Forgotten, 2.0),
            (Finished, 3.0),
            (Finished, 3.0),
        ]


@in_loop
async def test_forgotten_requests_that_arrive_late_are_not_learned(log):
    """Late requests are duplicates, or come from a replica that was disconnected; own events count, too."""
    async with replicas_of(log, 3) as (one, two, late):
        for member in (one, two):
            member.read()
        await one.publish(request("a"), Forgotten("a", 2.0), ForgottenBefore(1.5))
        await late.publish(request("a", time=1.9), request("b", time=1.4), request("a", time=2.1))
        await two.has(4)
        await one.has(1)
        assert [event.time for event in one.taken] == [2.1]


@in_loop
async def test_text_of_a_dropped_namespace_is_removed_from_redis(log):
    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a", 7, 7, 7))
        await one.publish(request("b"), Dropped(2.0), request("c", time=3.0))
        assert log.client.xlen(log.key) == 1
        two.read()
        await two.has(2)
        assert [type(event) for event in two.taken] == [Dropped, Finished]


@pytest.mark.parametrize(("age_s", "kept"), [(3600, 3), (-3600, 1), (-1e300, 1), (1e300, 3)])
@in_loop
async def test_forgotten_old_text_is_removed_from_redis(log, age_s, kept):
    """The age of text is measured by the clock of Redis. The event that forgets is always kept."""
    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        await one.publish(request("b"))
        await one.publish(ForgottenBefore(time.time() - age_s))
        assert log.client.xlen(log.key) == kept
        two.read()
        await two.has(kept)


@in_loop
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


@in_loop
async def test_reader_notices_trimming_beyond_its_position(log, monkeypatch):
    monkeypatch.setattr(reader, "LAG_INTERVAL_S", 0.0)
    monkeypatch.setattr(reader, "ENTRIES_AT_ONCE", 1)
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


@in_loop
async def test_reader_continues_after_redis_lost_entries(log):
    """Redis may restart with an older state, or with a clock that was set back."""
    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        two.read(LogPosition(int((time.time() + 3600) * 1000), 0))
        await eventually(lambda: two.log.counters.gaps == 1)
        await one.publish(request("b"))
        await two.has(1)
        assert two.names == ["b"]


@in_loop
async def test_log_size_is_bounded(log, monkeypatch):
    monkeypatch.setattr(shared_log, "GATHER_S", 0.0)
    bound = 1 << 20
    async with replicas_of(log, 2, max_tokens=bound // BYTES_PER_TOKEN) as (one, two):
        rng = np.random.default_rng(0)
        used = []
        # A few large entries, many small ones, and large ones again.
        for entries, tokens in ((60, 10_000), (400, 500), (60, 10_000)):
            for number in range(entries):
                await one.publish(request(f"{entries}-{number}", *rng.integers(0, 50_000, tokens)))
                used.append(log.client.memory_usage(log.key, samples=0))
        assert max(used) < 1.1 * bound
        assert min(used[60:]) > 0.7 * bound
        two.read()
        await eventually(lambda: two.names[-1:] == ["60-59"])


@in_loop
async def test_reader_waits_for_learning(log, monkeypatch):
    monkeypatch.setattr(reader, "ENTRIES_AT_ONCE", 2)
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
        async with asyncio.timeout(redis_stream.BLOCK_S / 2):
            await two.has(12)


@in_loop
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


@in_loop
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
        assert two.names.count("a") == 1


@in_loop
async def test_exceptions_of_the_consumer_end_the_reader(log):
    async def take(_events):
        raise RuntimeError("no room")

    async with replicas_of(log, 2) as (one, two):
        await one.publish(request("a"))
        reading = two.log.reader(OLDEST, [])
        with pytest.raises(RuntimeError, match="no room"):
            await reading.run(take)
        assert reading.position == OLDEST


@in_loop
async def test_reader_can_be_cancelled(log, monkeypatch):
    """A reader can be cancelled at any await."""
    monkeypatch.setattr(reader, "LAG_INTERVAL_S", 0.0)
    async with replicas_of(log, 1) as (one,):
        for number in range(40):
            await one.publish(request(str(number)))
        shared = Replication(LogConfig(url=log.url, prefix=log.prefix))
        for turns in range(0, 300, 3):
            replica = Replica(shared.open("namespace"))
            replica.read()
            for _ in range(turns):
                await asyncio.sleep(0)
            async with asyncio.timeout(2):
                await replica.close()
        await shared.stop()
