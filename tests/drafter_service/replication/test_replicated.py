"""Namespaces that follow a shared log in a real Redis."""

import asyncio
import math
import time
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import structlog
from redis import Redis

from drafter_service.observability.facts import ModelIdentity
from drafter_service.replication.events import Event, Kind
from drafter_service.replication.redis_stream import RedisStream, connect
from drafter_service.replication.replicated import EVENTS_PER_TURN, ReplicatedNamespace, Replication
from drafter_service.server.namespaces import Namespaces
from drafter_service.settings.tree import LogConfig
from tests.drafter_service.guarded import run
from tests.drafter_service.replication.replica import eventually, forgotten, replicas, request
from tests.drafter_service.server.opened_namespaces import UNKNOWN_MODEL, config_of, learned, still_namespace
from tests.redis import running_redis
from tests.strategies import array

AHEAD = time.time() + 3600
"""Time of a text of a sidecar whose clock is ahead."""


@pytest.fixture
def url():
    with running_redis() as server:
        yield server.url


@asynccontextmanager
async def following(url, name=b"own", restored=None, *, known=False):
    """Yield a namespace that follows the log, and its replication; known: it has learned "old" and "new" before."""
    client = connect(url)
    with still_namespace() as namespace:
        for text, finished_at in (("old", 999.0), ("new", 1000.5)) if known else ():
            namespace.learn(array([1, 2]), text, finished_at=finished_at)
        namespace.restored_position = restored
        replicated = ReplicatedNamespace(namespace, RedisStream(client, "default", "namespace"), name, 1 << 30)
        try:
            yield namespace, replicated
        finally:
            await replicated.close()
            await client.aclose()


@run
async def test_everything_in_earlier_entries_is_forgotten_whatever_its_time(url):
    async with replicas(url, 1) as (other,), following(url, b"one") as (one, _), following(url, b"two") as (two, _):
        await other.publish(request("ahead", time=AHEAD))
        await eventually(lambda: one.has_learned("ahead") and two.has_learned("ahead"))
        one.forget_before(math.inf)
        one.learn(array([1, 2]), "later")
        await eventually(lambda: two.has_learned("later") and one.log_position() == two.log_position())
        assert [*map(one.has_learned, ["ahead", "later"])] == [False, True]
        assert not two.has_learned("ahead")


@run
async def test_text_that_is_not_in_the_log_yet_is_kept_unless_it_is_older(url):
    """Only text that was read from earlier entries, or is in the restored snapshot, is forgotten whatever its time."""
    async with replicas(url, 1) as (other,):
        await other.publish(request("first"))
        for restored, kept in ((None, [False, True]), ("1-0", [False, False])):
            async with following(url, restored=restored, known=True) as (namespace, _):
                await other.publish(Event(Kind.DROPPED, 1000.0), request(f"last {restored}", time=1000.2))
                await eventually(lambda restored=restored, each=namespace: each.has_learned(f"last {restored}"))
                assert [*map(namespace.has_learned, ["old", "new"])] == kept


@run
async def test_a_request_that_ran_while_it_was_forgotten_is_forgotten_by_all(url):
    """A sidecar that could not reach the log finishes a request after it was forgotten, and reads that later."""
    async with following(url, b"one") as (one, _), replicas(url, 1) as (late,):
        now = time.time()
        await late.publish(forgotten("r", now - 10), request("r", time=now))
        await eventually(lambda: one.has_learned("r"))
        async with following(url, b"two") as (two, _):
            two.learn(array([1, 2, 3]), "r", finished_at=now, is_from_log=True)
            await eventually(lambda: not one.has_learned("r"))
            await late.publish(request("r", time=now), request("last"))
            await eventually(lambda: one.has_learned("last") and two.has_learned("last"))
            assert not one.has_learned("r")
            assert not two.has_learned("r")


@run
async def test_text_of_another_vocabulary_is_not_learned(url):
    with structlog.testing.capture_logs() as logged:
        async with following(url) as (namespace, replicated), replicas(url, 1) as (other,):
            namespace.model = replace(ModelIdentity(), vocab_size=100)
            for number in range(3):
                await other.publish(request(f"other-{number}", 1, 100))
            await other.publish(request("own", 1, 99))
            await eventually(lambda: namespace.has_learned("own"))
            assert not namespace.has_learned("other-0")
            assert (replicated.facts().malformed, namespace.corpus.requests) == (3, 0)
    assert [line["event"] for line in logged] == ["shared_log_has_another_vocabulary"]


@run
async def test_a_namespace_that_lost_its_text_learns_it_again_from_its_own_entries(url):
    """Each text once, without a name, too."""
    async with replicas(url, 1) as (other,):
        for is_first in (True, False):
            async with following(url) as (namespace, replicated):
                if is_first:
                    namespace.learn(array([1, 2, 3]), "own")
                    namespace.learn(array([4, 5, 6]), None)
                    await replicated._log.flush()
                    await other.publish(request("last"))
                await eventually(lambda namespace=namespace: namespace.has_learned("last"))
                namespace.corpus.refresh()
                assert namespace.corpus.requests == 3
                assert replicated.facts().duplicates == 0


@run
async def test_other_tasks_run_while_the_log_is_learned(url):
    async with replicas(url, 1) as (other,):
        await other.publish(*(request(f"{number}") for number in range(1000)), request("last"))
    learned, turns = [], [0]
    async with following(url) as (namespace, _):
        learn = namespace.learn

        def count(*arguments, **options):
            turns[-1] += 1
            learned.append(learn(*arguments, **options))

        namespace.learn = count
        while len(learned) < 1001:
            await asyncio.sleep(0)
            turns.append(0)
    assert max(turns) <= EVENTS_PER_TURN
    assert np.sum(turns) == 1001


@run
async def test_a_stored_namespace_is_loaded_only_if_the_log_forgets_text(url, tmp_path):
    replication = Replication(LogConfig(url=url))
    namespaces = Namespaces(config_of(tmp_path, fit=1), on_loaded=replication.add, on_unload=replication.remove)
    async with replicas(url, 1, namespace="a") as (other,):
        with Redis.from_url(url) as redis:

            async def follow(*events, keep=None):
                """Publish events, trim the log to some entries, and follow it; return what was logged."""
                for event in events:
                    await other.publish(event)
                redis.xtrim("ssd:{default}:a", maxlen=99 if keep is None else keep, approximate=False)
                with structlog.testing.capture_logs() as logged:
                    await namespaces.follow_log(replication.forgets)
                return [line["event"] for line in logged]

            await other.publish(request("old"), request("kept"))
            namespace = await learned(namespaces, "a")
            await eventually(lambda: namespace.has_learned("kept"))
            await namespaces.unload_idle(0)
            loads = ["namespace loaded", "namespace unloaded"]
            assert await follow(request("new")) == []
            assert await follow(forgotten("old", 2.0)) == loads
            assert await follow(request("newer")) == []
            async with namespaces.use("b", UNKNOWN_MODEL):
                failure = "stored namespace not updated from the shared log"
                assert await follow(forgotten("new", 2.0)) == [failure], "there is no memory for it"
            assert await follow() == ["namespace unloaded", *loads]
            # Events of this kind may be among those that were trimmed, or lost.
            assert await follow(request("x"), request("y"), keep=1) == [
                loads[0],
                "shared_log_trimmed_before_read",
                loads[1],
            ]
            redis.delete("ssd:{default}:a")
            assert await follow() == [loads[0], "shared_log_lost_entries", loads[1]]
            assert await follow() == []
            namespace = await learned(namespaces, "a")
            known = [name for name in ("old", "kept", "new", "newer", "y") if namespace.has_learned(name)]
            assert known == ["kept", "newer", "y"]
    await namespaces.close()
    await replication.stop()
