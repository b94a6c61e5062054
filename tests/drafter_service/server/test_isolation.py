"""Calls of one tenant read nothing of another's namespace."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from drafter_service.settings.tree import AccessConfig, ServiceConfig
from ssd.corpus.corpus import Corpus
from tests.certificates import replace_file
from tests.drafter_service.guarded import caller_entry, run
from tests.drafter_service.raw import batch, connected, counted, drafted, eventually, finish, start, texts
from tests.drafter_service.server.opened_namespaces import DRAFTING
from tests.servers import running, serving

OWN, OTHER = counted(100), counted(500)
CALLS = {
    "Observe": ("learn", {"texts": texts([1, 2])}),
    "Forget": ("admin", {"everything": True}),
    "Report": ("read", {}),
    "Snapshot": ("admin", {}),
    "DropNamespace": ("admin", {}),
}
"""The right that each call needs, and its fields."""
LOOKED_UP = ("get", "__getitem__", "__contains__", "pop", "setdefault")


class CountedNames(dict):
    """The loaded namespaces; counts lookups by name."""

    def __init__(self, names):
        super().__init__()
        self.names = names


for method in LOOKED_UP:

    def counted_lookup(self, name, *default, method=method):
        self.names[name] += 1
        return getattr(dict, method)(self, name, *default)

    setattr(CountedNames, method, counted_lookup)


@asynccontextmanager
async def counting(monkeypatch, tmp_path, address):
    """Run a service for two tenants; yield its namespaces, and the counts of their lookups by name and by corpus."""
    callers = tmp_path / "callers.toml"
    entries = [caller_entry(name, name, "read", "learn", "admin") for name in "ab"]
    callers.write_text("".join([*entries, *(caller_entry(right, "b", right) for right in ("read", "learn", "admin"))]))
    config = ServiceConfig(listen=address, drafting=DRAFTING, access=AccessConfig(callers=callers))
    monkeypatch.setattr("drafter_service.server.server.SAMPLE_S", 3600)  # Samples read all namespaces.
    names, views = Counter(), Counter()
    view = Corpus.view.fget

    def counted_view(corpus):
        views[id(corpus)] += 1
        return view(corpus)

    monkeypatch.setattr(Corpus, "view", property(counted_view))
    async with running(config) as (server, _):
        server.namespaces.loaded = CountedNames(names)
        yield server.namespaces.loaded, names, views


def check_refusals(address, token):
    """Check that calls for the namespace "b" are refused to a caller that has at most another right there."""
    with connected(address, (("authorization", f"Bearer {token}"),)) as caller:
        for method, (needed, fields) in CALLS.items():
            if token != needed:
                code, reason = caller.refusal(method, namespace="b", **fields)
                assert code is grpc.StatusCode.PERMISSION_DENIED
                assert reason.endswith("to namespace 'b'")
        if token != "read":
            with pytest.raises(grpc.RpcError):
                caller.stream("b")


def draft_of(caller, namespace, context):
    """Use a stream of a namespace in every way; return its draft after a context."""
    stream = caller.stream(namespace)
    tokens = drafted(stream.exchange(starts=[start(1, context)], batch=batch({1: ()})))
    stream.exchange(finishes=[finish(1, [context[-1] + 1], learn=False)])
    stream.end()
    return tokens


def use_service(address, loaded, names, views):
    with (
        connected(address, (("authorization", "Bearer a"),)) as a,
        connected(address, (("authorization", "Bearer b"),)) as b,
    ):
        a.observe("a", OWN)
        b.observe("b", OTHER)
        eventually(lambda: draft_of(b, "b", OTHER[:8]))
        corpora = {id(dict.__getitem__(loaded, name).corpus): name for name in "ab"}
        names.clear()
        views.clear()
        assert draft_of(a, "a", OTHER[:8]) == []
        a.observe("a", counted(900))
        a.call("Report", namespace="a")
        a.call("Forget", namespace="a", request_id="some")
        for token in ("a", "read", "learn", "admin"):
            check_refusals(address, token)
        [listed] = a.call("ListNamespaces").namespaces
        assert listed.name == "a"
        assert {corpora[corpus] for corpus in views} == {"a"}
        assert names.keys() == {"a"}
        assert names["b"] == 0
        # The same calls by the other tenant are counted.
        assert draft_of(b, "b", OTHER[:8])
        assert names["b"] > 0
        assert "b" in {corpora[corpus] for corpus in views}


@run
async def test_calls_look_up_nothing_outside_the_callers_namespaces(monkeypatch, tmp_path, socket_address):
    async with counting(monkeypatch, tmp_path, socket_address) as (loaded, names, views):
        await asyncio.to_thread(use_service, socket_address, loaded, names, views)


def test_a_changed_callers_file_applies_to_a_running_service(monkeypatch, tmp_path, socket_address):
    monkeypatch.setattr("drafter_service.server.server.CHECK_INTERVAL_S", 0.01)
    file = tmp_path / "callers.toml"
    file.write_text(caller_entry("a", "*", "learn"))
    with (
        serving(listen=socket_address, drafting=DRAFTING, access=AccessConfig(callers=file)),
        connected(socket_address, [("authorization", "Bearer a")]) as caller,
    ):
        assert caller.observe("n", [1]).texts == 1

        def is_refused():
            try:
                caller.observe("n", [1])
            except grpc.RpcError as refused:
                return refused.code() is grpc.StatusCode.PERMISSION_DENIED
            return False

        replace_file(file, caller_entry("a", "*", "read"))
        eventually(is_refused)
