"""Calls of one tenant read nothing of another's namespace."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager

import grpc
import pytest

from drafter_service.server.listener import Listener
from drafter_service.server.server import DrafterServer
from drafter_service.settings.tree import AccessConfig, ServiceConfig
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from tests.drafter_service.guarded import caller_entry, run
from tests.drafter_service.raw import batch, connected, counted, drafted, eventually, finish, start, texts

OWN, OTHER = counted(100), counted(500)
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
    callers.write_text("".join(caller_entry(name, name, "read", "learn", "admin") for name in "ab"))
    config = ServiceConfig(
        listen=address,
        drafting=DrafterConfig(capacity=10_000),
        access=AccessConfig(callers=callers),
    )
    monkeypatch.setattr("drafter_service.server.server.SAMPLE_S", 3600)  # Samples read all namespaces.
    listener = Listener(config)
    await listener.start()
    server = DrafterServer(config, listener)
    names, views = Counter(), Counter()
    server.namespaces.loaded = CountedNames(names)
    view = Corpus.view.fget

    def counted_view(corpus):
        views[id(corpus)] += 1
        return view(corpus)

    monkeypatch.setattr(Corpus, "view", property(counted_view))
    await server.start()
    yield server.namespaces.loaded, names, views
    await server.stop()


def refused(caller):
    """Make every call for the namespace "b", which must be refused."""
    for method, fields in {
        "Observe": {"texts": texts([1, 2])},
        "Forget": {"everything": True},
        "Report": {},
        "Snapshot": {},
        "DropNamespace": {},
    }.items():
        assert caller.refusal(method, namespace="b", **fields)[0] is grpc.StatusCode.PERMISSION_DENIED
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
        refused(a)
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
