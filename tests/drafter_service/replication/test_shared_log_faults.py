"""Faults of Redis: replicas continue without it and catch up, and log neither secrets nor text."""

import asyncio
import sys
import traceback
from contextlib import asynccontextmanager, suppress
from types import SimpleNamespace

import numpy as np
import pytest
import structlog
from redis import Redis
from redis.asyncio import Redis as AsyncRedis
from redis.asyncio.client import Pipeline

from drafter_service.auth.callers import AuthorizedCall
from drafter_service.replication import redis_stream, shared_log
from drafter_service.replication.events import Event, Kind, decode
from drafter_service.replication.replicated import Replication
from drafter_service.replication.shared_log import EVENT_WEIGHT
from drafter_service.server.admin import Admin
from drafter_service.server.namespace import UnpublishedError
from drafter_service.server.namespaces import Namespaces
from drafter_service.settings.tree import LogConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.errors import UserError
from tests.certificates import Authority
from tests.drafter_service.guarded import run
from tests.drafter_service.replication.replica import TIMEOUT_S, eventually, forgotten, replicas, request
from tests.drafter_service.server.opened_namespaces import config_of, learned
from tests.redis import free_port, running_redis

EVERYBODY = AuthorizedCall(SimpleNamespace(invocation_metadata=list, auth_context=dict), None)
KEY = "ssd:{default}:namespace"
PERSISTENT = ("--appendonly", "yes", "--appendfsync", "always")


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(redis_stream, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(redis_stream, "MAX_PAUSE_S", 0.05)
    monkeypatch.setattr(shared_log, "FLUSH_S", 0.2)


@pytest.fixture
def logged():
    with structlog.testing.capture_logs() as lines:
        yield lines


def events_of(lines):
    return [line["event"] for line in lines]


def lose_answer(monkeypatch, kind, method):
    """Let the next call of a method of redis-py fail after Redis has done it; return the list of lost answers."""
    own, lost = getattr(kind, method), []

    async def fails_once(self, *given, **options):
        answer = await own(self, *given, **options)
        if answer and not lost:
            lost.append(answer)
            raise ConnectionError
        return answer

    monkeypatch.setattr(kind, method, fails_once)
    return lost


@run
async def test_a_redis_that_does_not_answer_is_reported_at_the_start(logged):
    replication = Replication(LogConfig(url="redis://127.0.0.1:1"))
    assert [await replication.answers() for _ in range(2)] == [False, False]
    assert not replication.facts().is_connected
    await replication.stop()
    assert [(line["event"], line["log_level"], line["error"]) for line in logged] == [
        ("shared_log_unavailable", "warning", "ConnectionError")
    ]


@run
async def test_requests_are_written_and_read_again_after_lost_answers_and_learned_once(logged, monkeypatch):
    with running_redis() as server, Redis.from_url(server.url) as client:
        async with replicas(server.url, 2) as (one, two):
            two.read()
            await one.publish(request("a"))
            lost = [lose_answer(monkeypatch, *method) for method in ((Pipeline, "execute"), (AsyncRedis, "xread"))]
            await one.publish(request("b"), forgotten("b", 2.0), request("c"))
            await two.has(7)
            assert [len(each) for each in lost] == [1, 1]
            assert client.xlen(KEY) == 3
            # The events are read twice; a namespace learns a name once, and not what was forgotten.
            read = [(event.kind, event.request) for event in two.taken[1:]]
            assert read == [(Kind.FINISHED, "b"), (Kind.FORGOTTEN, "b"), (Kind.FINISHED, "c")] * 2
            assert (one.log.counters.errors, two.log.counters.errors) == (1, 1)
            assert one.log.counters.published_tokens == 9
            assert sorted(events_of(logged)) == ["shared_log_available"] * 2 + ["shared_log_unavailable"] * 2


@pytest.mark.parametrize("kept", [(), PERSISTENT], ids=["in-memory", "persistent"])
@run
async def test_redis_is_killed_and_restarted(kept, logged):
    with running_redis(*kept) as server:
        async with replicas(server.url, 2) as (one, two):
            for member in (one, two):
                member.read()
            await one.publish(*(request(f"before-{number}") for number in range(50)))
            await two.has(50)
            server.kill()
            for number in range(50):
                for who, member in (("one", one), ("two", two)):
                    member.log.publish(request(f"{who}-{number}"))
            await eventually(lambda: min(one.log.counters.errors, two.log.counters.errors) > 4)
            assert two.reader.lag_s > 0
            server.start()
            await two.has(100)
            await one.has(50)
            await one.publish(request("after"))
            await two.has(101)
            assert two.names == [
                *(f"before-{number}" for number in range(50)),
                *(f"one-{number}" for number in range(50)),
                "after",
            ]
            assert one.names == [f"two-{number}" for number in range(50)]
            assert one.log.counters.dropped_tokens == two.log.counters.dropped_tokens == 0
            # Entries of other sidecars may have been lost with Redis.
            assert two.log.counters.gaps == (0 if kept else 1)
            # Two writers and two readers log it once each, for any number of attempts.
            assert events_of(logged).count("shared_log_unavailable") == 4
            assert events_of(logged).count("shared_log_available") == 4


@run
async def test_newest_requests_and_all_forgetting_wait_for_redis(logged, monkeypatch):
    room, weight = 100, 3 + len("0000") // 4 + EVENT_WEIGHT
    monkeypatch.setattr(shared_log, "QUEUE_TOKENS", room * weight)
    with running_redis() as server:
        async with replicas(server.url, 2) as (one, two):
            two.read()
            await one.publish(request("first"))
            await two.has(1)
            server.kill()
            one.log.publish(forgotten("first", 2.0))
            await eventually(lambda: one.log.counters.errors)
            for number in range(10_000):
                one.log.publish(request(f"{number:04}"))
            assert one.log.counters.dropped_tokens == 3 * (10_000 - room)
            server.start()
            await two.has(2 + room)
            assert two.taken[1][:3] == (Kind.FORGOTTEN, 2.0, "first")
            assert two.names == ["first", *(f"{number:04}" for number in range(10_000 - room, 10_000))]
            assert events_of(logged).count("shared_log_drops_requests") == 1


@run
async def test_publishing_does_not_wait_for_a_hanging_redis(monkeypatch):
    monkeypatch.setattr(redis_stream, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(redis_stream, "BLOCK_S", 0.1)
    with running_redis() as server:
        async with replicas(server.url, 2) as (one, two):
            two.read()
            await one.publish(request("a"))
            await eventually(lambda: two.names)
            server.hang()
            try:
                for number in range(1000):
                    one.log.publish(request(str(number)))
                await eventually(lambda: one.log.counters.errors and two.log.counters.errors)
            finally:
                server.resume()
            # An entry is written twice if Redis has taken it before it hung.
            await eventually(lambda: len({*two.names}) == 1001)


@run
async def test_key_of_another_type_does_not_affect_other_namespaces():
    with running_redis() as server, Redis.from_url(server.url) as client:
        client.set(KEY, "something else")
        async with replicas(server.url, 1) as (affected,), replicas(server.url, 2, namespace="other") as (one, two):
            affected.read()
            two.read()
            affected.log.publish(request("a"))
            await one.publish(request("b"))
            await two.has(1)
            await eventually(lambda: affected.log.counters.errors > 3)
            client.delete(KEY)
            await affected.log.flush()
            assert affected.log.counters.published_tokens == 3


@run
async def test_closing_publishes_what_waits_unless_redis_is_unavailable(logged, monkeypatch):
    with running_redis() as server, Redis.from_url(server.url) as client, monkeypatch.context() as patch:
        patch.setattr(shared_log, "FLUSH_S", TIMEOUT_S)
        async with replicas(server.url, 1) as (one,):
            one.log.publish(request("a"))
        assert client.xlen(KEY) == 1
    async with asyncio.timeout(TIMEOUT_S), replicas(server.url, 1) as (one,):
        one.log.publish(request("a"))
        one.log.publish(forgotten("b", 1.0))
        await eventually(lambda: one.log.counters.errors)  # These events are being added.
        one.log.publish(request("c"))
        assert not await one.log.is_published()
    assert one.log.counters.dropped_tokens == 6
    assert [line["events"] for line in logged if line["event"] == "shared_log_discards_events"] == [3]


@run
async def test_an_event_is_published_although_others_follow_without_end(monkeypatch):
    with running_redis() as server:
        async with replicas(server.url, 1) as (one,):
            add = redis_stream.RedisStream.add

            async def add_while_another_comes(stream, entries):
                one.log.publish(request("another"))
                return await add(stream, entries)

            with monkeypatch.context() as patch:
                patch.setattr(redis_stream.RedisStream, "add", add_while_another_comes)
                async with asyncio.timeout(TIMEOUT_S):
                    await one.publish(forgotten("a", 1.0))
                assert one.log.has_unpublished()


@run
async def test_an_entry_is_not_added_again_if_it_could_not_be_trimmed(monkeypatch):
    lost = lose_answer(monkeypatch, AsyncRedis, "xtrim")
    with running_redis() as server, Redis.from_url(server.url) as client:
        async with replicas(server.url, 1) as (one,):
            await one.publish(request("a"))
            await one.publish(Event(Kind.DROPPED, 1.0), request("b"))
            assert (len(lost), one.log.counters.errors, client.xlen(KEY)) == (1, 1, 1)
            assert client.info("commandstats")["cmdstat_xadd"]["calls"] == 2


@asynccontextmanager
async def sidecar(url, folder):
    """Yield the namespaces of a sidecar, and its commands."""
    config = LogConfig(url=url)
    replication = Replication(config)
    namespaces = Namespaces(config_of(folder), on_loaded=replication.add, on_unload=replication.remove)
    try:
        yield namespaces, Admin(namespaces, None)
    finally:
        await namespaces.close()
        await replication.stop()


@run
async def test_forgetting_and_dropping_fail_until_the_others_can_be_told(tmp_path):
    key, text, named = "ssd:{default}:a", [1, 2, 3, 4], {"namespace": "a", "request_id": "a-0"}
    with running_redis(*PERSISTENT) as server, Redis.from_url(server.url) as client:
        async with sidecar(server.url, tmp_path / "one") as (own, admin), sidecar(server.url, None) as (others, _):

            async def known():
                await learned(own, "a", text)
                await eventually(lambda: has_learned(others))

            def has_learned(namespaces):
                return namespaces.loaded["a"].has_learned("a-0")

            await learned(others, "a")
            await known()
            # Each of these returns after Redis has its event.
            await admin.forget(pb.ForgetRequest(**named), EVERYBODY)
            assert kinds_in(client, key)[-1:] == [Kind.FORGOTTEN]
            await eventually(lambda: not has_learned(others))
            await known()
            await admin.drop_namespace(pb.DropNamespaceRequest(namespace="a"), EVERYBODY)
            assert kinds_in(client, key) == [Kind.DROPPED]
            await eventually(lambda: not has_learned(others))

            await known()
            server.kill()
            with pytest.raises(UnpublishedError, match="forgotten by this service, but not by the other sidecars"):
                await admin.forget(pb.ForgetRequest(**named), EVERYBODY)
            assert not has_learned(own)
            server.start()
            await admin_until_told(admin.forget, pb.ForgetRequest(**named))
            await eventually(lambda: not has_learned(others))

            await known()
            server.kill()
            with pytest.raises(UnpublishedError, match="namespace 'a' is dropped by this service"):
                await admin.drop_namespace(pb.DropNamespaceRequest(namespace="a"), EVERYBODY)
            assert not has_learned(own)
            assert not list(tmp_path.rglob("corpus.ssd"))
            server.start()
            await admin_until_told(admin.drop_namespace, pb.DropNamespaceRequest(namespace="a"))
            await eventually(lambda: not has_learned(others))
            assert "a" not in own.loaded


def kinds_in(client, key):
    """Return the kinds of the events in a log."""
    return [event.kind for _, fields in client.xrange(key) for event in decode(fields).events]


async def admin_until_told(command, message):
    """Repeat a command until it succeeds."""
    for _ in range(100):
        with suppress(UnpublishedError):
            return await command(message, EVERYBODY)
    raise AssertionError("the log is not reached")


@run
async def test_tls_with_a_password(tmp_path):
    authority = Authority(tmp_path)
    server_pair = authority.server()
    port = free_port()
    tls = (
        *("--port", "0", "--tls-port", str(port), "--tls-auth-clients", "no", "--requirepass", "secret/pass"),
        *("--tls-cert-file", str(server_pair.certificate), "--tls-key-file", str(server_pair.key)),
        *("--tls-ca-cert-file", str(authority.certificate)),
    )
    with running_redis(*tls):
        url = f"rediss://:secret%2Fpass@localhost:{port}?ssl_ca_certs={authority.certificate}"
        async with replicas(url, 2) as (one, two):
            two.read()
            await one.publish(request("a"))
            await two.has(1)
        # A server without a known certificate is refused.
        async with replicas(f"rediss://:secret%2Fpass@localhost:{port}", 1) as (refusing,):
            refusing.read()
            await eventually(lambda: refusing.log.counters.errors)
            assert not refusing.taken


@run
async def test_logs_contain_no_passwords_text_or_names(logged, monkeypatch):
    monkeypatch.setattr(shared_log, "QUEUE_TOKENS", 200)
    with running_redis("--requirepass", "right-secret") as server:
        wrong, right = (server.url.replace("//", f"//:{which}-secret@") for which in ("wrong", "right"))
        client = Redis.from_url(right)
        client.set(KEY, "something else")
        finished = Event(Kind.FINISHED, 1.0, "name-of-a-user", np.frombuffer(b"text of a user!!", np.uint32))
        async with replicas(wrong, 1) as (refused,), replicas(right, 1) as (one,):
            for member in (refused, one):
                member.read()
                member.log.publish(finished)
            for _ in range(9):
                one.log.publish(finished)
            await eventually(lambda: refused.log.counters.errors > 2 and one.log.counters.errors > 2)
            client.delete(KEY)
            await one.log.flush()
            entry = dict(client.xrange(KEY)[0][1])
            client.xadd(KEY, {**entry, b"kinds": b"x"})
            await eventually(lambda: one.log.counters.malformed)
        assert set(events_of(logged)) == {
            "shared_log_unavailable",
            "shared_log_available",
            "shared_log_drops_requests",
            "shared_log_discards_events",
            "shared_log_entries_malformed",
        }
        assert {"AuthenticationError", "ResponseError"} <= {line.get("error") for line in logged}
        for secret in ("secret", "name-of-a-user", "text of", str(int(finished.tokens[0]))):
            assert secret not in str(logged)


@pytest.mark.parametrize(
    ("url", "advice"),
    [
        ("http://:secret@host", "must begin with redis://"),
        ("secret", "must begin with redis://"),
        ("redis://:secret@host:port", "redis://[[user]:password@]host[:port][/database]"),
        ("redis://:secret@host:99999", "redis://[[user]:password@]host[:port][/database]"),
        ("redis://:secret@host?socket_timeout=long", "redis://[[user]:password@]host[:port][/database]"),
        ("redis://:secret@host?unheard_of=secret", "redis://[[user]:password@]host[:port][/database]"),
    ],
)
def test_unusable_url_is_refused_without_quoting_it(url, advice):
    with pytest.raises(UserError) as caught:
        Replication(LogConfig(url=url))
    assert advice in str(caught.value)
    assert "secret" not in "".join(traceback.format_exception(caught.value))


def test_missing_redis_py_is_reported_with_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "redis.asyncio", None)
    with pytest.raises(UserError, match=r"pip install '\.\[redis\]'"):
        Replication(LogConfig(url="redis://localhost"))
