"""Two real sidecars that share a log in a real Redis."""

from contextlib import ExitStack

import pytest

from tests.drafter_service.raw import connected, eventually
from tests.redis import running_redis
from tests.servers import served

TEXT = [7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18]
OTHER = [100 + token for token in TEXT]


@pytest.fixture
def redis():
    with running_redis() as server:
        yield server


@pytest.fixture
def replica(redis, tmp_path):
    """Return a function that starts a sidecar and returns a caller and a function that stops it."""
    with ExitStack() as services:

        def start(name):
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            service = services.enter_context(ExitStack())
            options = ("--capacity", "100k", "--snapshot-folder", str(folder / "snapshots"), "--log", redis.url)
            service.enter_context(served("--listen", f"unix:{folder}/s", *options))
            return service.enter_context(connected(f"unix:{folder}/s")), service.close

        yield start


def drafts(caller, text=TEXT):
    return caller.probe("shared", text[:6])[:3] == text[6:9]


def test_replicas_learn_and_forget_together(replica):
    one, _ = replica("one")
    two, _ = replica("two")
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
    one, _ = replica("one")
    one.observe("shared", TEXT, names=["first"])
    eventually(lambda: drafts(one))
    two, stop_two = replica("two")
    eventually(lambda: drafts(two))
    stop_two()
    one.observe("shared", OTHER, names=["second"])
    two, _ = replica("two")
    eventually(lambda: drafts(two, OTHER) and drafts(two))
    [namespace] = two.call("ListNamespaces").namespaces
    assert namespace.tokens == len(TEXT) + len(OTHER) + 2
