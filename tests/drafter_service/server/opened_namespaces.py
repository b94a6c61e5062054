"""Helpers for tests of namespaces without a server: open them, learn text, draft, block the writing of snapshots."""

import asyncio
import threading
import time
from contextlib import asynccontextmanager, contextmanager

from drafter_service.observability.facts import ModelIdentity
from drafter_service.server import namespaces as module
from drafter_service.server.namespace import Namespace
from drafter_service.server.namespaces import Namespaces, max_bytes
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits, NamespacesConfig, ServiceConfig, SnapshotsConfig
from drafter_service.stubs import drafter_pb2 as pb
from ssd.config import DrafterConfig
from ssd.corpus.corpus import Corpus
from tests.drafter_service.raw import batch, drafted, start
from tests.strategies import array

DRAFTING = DrafterConfig(capacity=5000, refresh_interval_s=0.001)


UNKNOWN_MODEL = ModelIdentity()


class StillCorpus(Corpus):
    """A corpus that only the test refreshes; a namespace's thread would do so at any time after the first change."""

    def maintain(self, _interval_s):
        """Do nothing."""


@contextmanager
def still_namespace(config=DRAFTING, known=(), clock=time.time, **options):
    """Yield a namespace that has learned some texts, and whose corpus only the test refreshes."""
    corpus = StillCorpus(config.capacity, config.match_depth, clock)
    for text in known:
        corpus.append(array(text))
    corpus.refresh()
    namespace = Namespace("some", UNKNOWN_MODEL, config, corpus, **options)
    try:
        yield namespace
    finally:
        namespace.close()
        corpus.close()


def answered(session, **fields):
    """Return the response to a request without an error, after the session has learned from it."""
    response = session.answer(pb.DraftRequest(**fields), may_learn=True)
    assert not response.HasField("error"), response.error.message
    session.record()
    return response


def config_of(folder=None, *, fit=10, trim=False, **changes):
    """Return a configuration; fit: number of namespaces within the memory limit."""
    limit = fit * max_bytes(DRAFTING.capacity)
    return ServiceConfig(
        drafting=DRAFTING,
        namespaces=NamespacesConfig(memory_limit=limit, **changes),
        snapshots=SnapshotsConfig(folder=folder, trim=trim),
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


async def saved(folder, *texts, name="a"):
    """Save a namespace with some texts, by default [1, 2, 3, 4]; return the contents of its files."""
    async with opened(folder) as namespaces:
        await namespaces.save(await learned(namespaces, name, *(texts or [[1, 2, 3, 4]])))
    return contents(folder)


def contents(folder):
    """Return the contents of all files below a folder, by their names."""
    return {path.name: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def draft_of(namespace, context, limit=3):
    session = Session(namespace, Limits())
    request = pb.DraftRequest(starts=[start(1, context, learn=False)], batch=batch({1: ()}, limit))
    tokens = drafted(session.answer(request, may_learn=True))
    session.close()
    return tokens


def raising(problem):
    """Return a function that raises an exception."""

    def fail(*_, **__):
        raise problem

    return fail


def limit_disk(monkeypatch, seconds):
    """Let callers wait for files this long, whatever their sizes."""
    monkeypatch.setattr(module, "DISK_LIMIT_S", seconds)
    monkeypatch.setattr(module, "DISK_BYTES_PER_S", 1e12)


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
