"""Two real sidecars that share a log in a real Redis."""

import json
from contextlib import ExitStack

import pytest

from drafter_service.settings.tree import LogConfig, SnapshotsConfig
from drafter_service.transport.wire import pack
from ssd.config import DrafterConfig
from tests.drafter_service.raw import connected, eventually
from tests.redis import running_redis
from tests.servers import served, serving
from tests.strategies import array

TEXT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
OTHER = [100 + token for token in TEXT]
DRAFTING = DrafterConfig(capacity=100_000)


@pytest.fixture
def redis():
    with running_redis("--appendonly", "yes", "--appendfsync", "always") as server:
        yield server


@pytest.fixture
def replica(redis, tmp_path):
    """Return a function that starts a sidecar and returns a caller, a function that stops it, and its process; None if
    it runs in a thread.
    """
    with ExitStack() as services:

        def start(name, *, in_thread=True, save_s=300.0):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            address, snapshots = f"unix:{folder}/s", folder / "snapshots"
            service = services.enter_context(ExitStack())
            if in_thread:
                parts = {"drafting": DRAFTING, "snapshots": SnapshotsConfig(snapshots, save_s)}
                process = service.enter_context(serving(listen=address, log=LogConfig(redis.url), **parts))
            else:
                options = ("--capacity", "100k", "--snapshot-folder", str(snapshots), "--log", redis.url)
                process = service.enter_context(served("--listen", address, *options))
            return service.enter_context(connected(address)), service.close, process

        yield start


def drafts(caller, text=TEXT):
    return caller.probe("shared", text[:6])[:3] == text[6:9]


def test_replicas_learn_and_forget_together(replica):
    one, *_ = replica("one")
    two, *_ = replica("two")
    two.probe("shared", TEXT[:6])
    one.observe("shared", TEXT, names=["first"])
    eventually(lambda: drafts(one) and drafts(two))
    two.observe("shared", OTHER, names=["second"])
    eventually(lambda: drafts(one, OTHER))
    assert one.observe("shared", OTHER, names=["second"]).duplicates == 1
    answer = two.call("Forget", namespace="shared", request_id="first")
    assert (answer.texts, answer.is_shared) == (1, True)
    assert not drafts(two)
    eventually(lambda: not drafts(one))
    assert drafts(one, OTHER)
    two.call("DropNamespace", namespace="shared")
    eventually(lambda: not drafts(one, OTHER))
    assert not drafts(two, OTHER)


def test_new_and_restarted_replicas_catch_up_without_duplicates(replica):
    """A replica with a snapshot reads only what was published after it."""
    one, *_ = replica("one")
    one.observe("shared", TEXT)
    eventually(lambda: drafts(one))
    two, stop_two, _ = replica("two")
    eventually(lambda: drafts(two))
    stop_two()
    one.observe("shared", OTHER)
    two, *_ = replica("two")
    eventually(lambda: drafts(two, OTHER) and drafts(two))
    [namespace] = two.call("ListNamespaces").namespaces
    assert namespace.tokens == len(TEXT) + len(OTHER) + 2
    log = json.loads(two.call("Report").json)["service"]["log"]
    assert (log["consumed_tokens"], log["duplicates"]) == (len(OTHER), 0)


def test_a_namespace_that_a_replica_has_on_disk_only_follows_the_log(replica, tmp_path):
    one, *_ = replica("one")
    one.observe("shared", TEXT, OTHER, names=["first", "second"])
    two, stop_two, _ = replica("two")
    eventually(lambda: drafts(two) and drafts(two, OTHER))
    stop_two()
    two, *_ = replica("two", save_s=0.05)
    path = tmp_path / "two" / "snapshots" / "shared" / "corpus.ssd"
    assert pack(array(TEXT), "u4") in path.read_bytes()
    one.call("Forget", namespace="shared", request_id="first")
    eventually(lambda: pack(array(TEXT), "u4") not in path.read_bytes())
    assert pack(array(OTHER), "u4") in path.read_bytes()
    eventually(lambda: not two.call("ListNamespaces").namespaces[0].is_loaded)
    one.call("DropNamespace", namespace="shared")
    eventually(lambda: pack(array(OTHER), "u4") not in path.read_bytes())
    assert json.loads(two.call("Report").json)["service"]["log"]["gaps"] == 0


def test_acknowledged_texts_survive_kills_of_a_replica_and_of_redis(redis, replica):
    """A replica publishes a text some milliseconds after it has acknowledged it, so it is killed after that."""
    texts = [[token + 100 * number for token in TEXT] for number in range(24)]
    one, *_ = replica("one")
    two, stop_two, process = replica("two", in_thread=False)
    for number, text in enumerate(texts):
        if number == 10:
            eventually(lambda known=texts[:number]: all(drafts(one, earlier) for earlier in known))
            process.kill()
            process.wait()
            stop_two()
            two, stop_two, process = replica("two", in_thread=False)
        if number == 15:
            redis.kill()
        if number == 20:
            redis.start()
        (one if number % 2 else two).observe("shared", text)
    for caller in (one, two):
        eventually(lambda caller=caller: all(drafts(caller, text) for text in texts))
        [namespace] = caller.call("ListNamespaces").namespaces
        assert namespace.tokens == sum(len(text) + 1 for text in texts), "no text is learned twice"
