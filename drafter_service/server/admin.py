"""The calls other than Draft: learning from other text, forgetting, reports, snapshots, namespaces."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Collection
from functools import cache, partial

import structlog

from drafter_service.auth.callers import AuthorizedCall, PermissionDeniedError, Right
from drafter_service.observability.facts import ModelIdentity, ServiceFacts
from drafter_service.observability.report.build import build_report
from drafter_service.server.namespace import ClosedError, Namespace, UnpublishedError
from drafter_service.server.namespaces import NamespaceError, Namespaces, StalledError
from drafter_service.server.naming import KnownNamespace, is_default
from drafter_service.server.requests import read_model, read_texts
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import WireError
from ssd.corpus.sections import SnapshotError

logger = structlog.get_logger(__name__)

TEXTS_PER_TURN = 256
"""Number of texts learned before other tasks of the event loop run, and the caller's right is checked again."""


class Admin:
    """The unary calls of authorized callers. Used by the event loop alone."""

    def __init__(
        self,
        namespaces: Namespaces,
        facts: Callable[[Collection[str]], ServiceFacts],
    ) -> None:
        """Make the handlers; `facts` returns the facts of the named namespaces."""
        self._namespaces = namespaces
        self._facts = facts

    async def observe(self, request: pb.ObserveRequest, authorized: AuthorizedCall) -> pb.ObserveResponse:
        """Learn from finished text."""
        model = read_model(request.model)
        name = request.namespace or self._namespaces.default_of(model, authorized.caller)
        authorized.require(Right.LEARN, name)
        async with self._namespaces.use(name, model) as namespace:
            held = self._namespaces.held(namespace, partial(authorized.caller.may, Right.READ))
            response = pb.ObserveResponse(namespace=name, held=held)
            await learn(namespace, request.texts, response, partial(authorized.require, Right.LEARN, name))
            return response

    async def forget(self, request: pb.ForgetRequest, authorized: AuthorizedCall) -> pb.ForgetResponse:
        """Forget text, wait until no draft can contain it, save the namespace again, and tell the other sidecars."""
        authorized.require(Right.ADMIN, request.namespace)
        what = request.WhichOneof("what")
        if what is None:
            raise WireError("nothing to forget is given: use request_id, older_than_s or everything")
        if what == "older_than_s" and not 0 <= request.older_than_s < math.inf:
            raise WireError(f"older_than_s is {request.older_than_s}; it is an age in seconds, 0 or more")
        await self._check_exists(request.namespace)
        async with self._namespaces.use(request.namespace, ModelIdentity()) as namespace:
            if what == "request_id":
                command = namespace.forget(request.request_id)
            else:
                # Not "until now": text may have been learned while the clock was ahead.
                moment = max(0.0, time.time() - request.older_than_s) if what == "older_than_s" else math.inf
                command = namespace.forget_before(moment)
            await namespace.refresh()
            is_saved = self._namespaces.store is not None
            if is_saved:
                try:
                    await self._namespaces.save(namespace)
                except SnapshotError as problem:
                    raise SnapshotError(
                        f"the text is forgotten in memory, but {problem}; until that is saved again, the text is "
                        "still on disk"
                    ) from None
            if not await namespace.is_published():
                raise UnpublishedError("the text is forgotten by this service")
            return pb.ForgetResponse(
                snapshot_saved=is_saved,
                texts=command.requests,
                set_aside_files=self._namespaces.set_aside.get(namespace.name, []),
                is_shared=namespace.log_position is not None,
            )

    async def report(self, request: pb.ReportRequest, authorized: AuthorizedCall) -> pb.ReportResponse:
        """Return the statistics of namespaces."""
        names = await self._chosen(authorized, request.namespace, Right.READ)
        report = await asyncio.to_thread(build_report, self._facts(names))
        return pb.ReportResponse(json=report.model_dump_json())

    async def snapshot(self, request: pb.SnapshotRequest, authorized: AuthorizedCall) -> pb.SnapshotResponse:
        """Save namespaces now. Raises SnapshotError, which names those that were not saved, after all others are.

        After one that stalls the others are not tried, since they are in the same folder.
        """
        names = await self._chosen(authorized, request.namespace, Right.ADMIN)
        if Right.ADMIN not in authorized.caller.rights:
            raise PermissionDeniedError(f"caller {authorized.caller.name!a} has no admin right to any namespace")
        response, failures = pb.SnapshotResponse(), list[str]()
        for name, namespace in sorted(self._namespaces.loaded.items()):
            if name not in names:
                continue
            try:
                _, size, taken = await self._namespaces.save(namespace)
            except ClosedError:
                continue  # It was dropped, or saved and unloaded, meanwhile.
            except SnapshotError as problem:
                failures.append(str(problem))
                if isinstance(problem, StalledError):
                    break
            else:
                response.saved.add(namespace=name, bytes=size, seconds=taken)
        if failures:
            raise SnapshotError("; ".join(dict.fromkeys(failures)))
        return response

    async def list_namespaces(
        self, _request: pb.ListNamespacesRequest, authorized: AuthorizedCall
    ) -> pb.ListNamespacesResponse:
        """List the namespaces that the caller may read."""
        found = await self._namespaces.names()
        known, caller = self._namespaces.known(), authorized.caller
        names = [name for name in found if name in known and caller.may(Right.READ, name)]
        return pb.ListNamespacesResponse(namespaces=[self._described(name, known[name]) for name in names])

    async def drop_namespace(
        self, request: pb.DropNamespaceRequest, authorized: AuthorizedCall
    ) -> pb.DropNamespaceResponse:
        """Delete a namespace, or only its files that were set aside."""
        authorized.require(Right.ADMIN, request.namespace)
        await self._check_exists(request.namespace)
        store, set_aside = self._namespaces.store, self._namespaces.set_aside.get(request.namespace, [])
        if not request.set_aside_only:
            await self._namespaces.drop(request.namespace)
        elif store is not None:
            set_aside = await self._namespaces.read_store(store.remove_set_aside, request.namespace)
        return pb.DropNamespaceResponse(set_aside_files=set_aside)

    async def _chosen(self, authorized: AuthorizedCall, namespace: str, right: Right) -> set[str]:
        """Return the namespaces that a request names, or all in memory or with files that were set aside.

        Raises PermissionDeniedError before anything is looked up, NamespaceError and LoadError.
        """
        if not namespace:
            known = {*self._namespaces.loaded, *self._namespaces.set_aside}
            return {name for name in known if authorized.caller.may(right, name)}
        authorized.require(right, namespace)
        await self._check_exists(namespace)
        return {namespace}

    async def _check_exists(self, name: str) -> None:
        if not await self._namespaces.exists(name):
            raise NamespaceError(f"there is no namespace {name[:200]!r}")

    def _described(self, name: str, known: KnownNamespace) -> pb.Namespace:
        """Return the row of a namespace."""
        namespace = self._namespaces.loaded.get(name)
        message = pb.Namespace(name=name, capacity=self._namespaces.drafting(name).capacity, tokens=known.tokens or 0)
        message.model.CopyFrom(pb.Model(**vars(known.model)))
        message.is_default = is_default(name, known.model)
        message.set_aside_files.extend(self._namespaces.set_aside.get(name, []))
        if namespace is not None:
            message.is_loaded = True
            message.memory_bytes = namespace.memory_bytes
            message.streams = len(namespace.streams)
            message.idle_s = 0.0 if namespace.streams else time.monotonic() - namespace.last_used
        return message


@cache
def _warn_of_prompt_lengths() -> None:
    logger.warning("texts.prompt_lengths is deprecated", advice="send only the end of each prompt")


async def learn(
    namespace: Namespace, message: pb.Texts, total: pb.ObserveResponse, check: Callable[[], None] = lambda: None
) -> None:
    """Learn finished texts at the rate of the index, and add their counts to `total`.

    check: called every `TEXTS_PER_TURN` texts; an exception of it ends learning. Raises WireError, with no effect, for
    an invalid message, and ClosedError.
    """
    texts = read_texts(message, namespace.model.vocab_size)
    kept = namespace.config.learned_prompt_tokens
    if message.prompt_lengths:
        _warn_of_prompt_lengths()
    for index, (text, name, prompt_length, finished_at, tag) in enumerate(texts):
        if index % TEXTS_PER_TURN == 0:
            await asyncio.sleep(0)
            check()
        await namespace.wait_for_room()
        learned = text[max(0, prompt_length - kept) :]
        if namespace.learn(learned, name, tag, finished_at=finished_at):
            total.tokens += len(learned)
            total.texts += 1
        else:
            total.duplicates += 1
