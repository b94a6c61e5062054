"""Namespaces that are made, used and dropped."""

import asyncio

import pytest

from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.namespace import IdentityError
from drafter_service.server.namespaces import NamespaceError
from drafter_service.server.session import Session
from drafter_service.settings.tree import Limits
from drafter_service.stubs import drafter_pb2 as pb
from ssd.corpus.sections import SnapshotError
from tests.drafter_service.guarded import run
from tests.drafter_service.raw import batch, start
from tests.drafter_service.server.opened_namespaces import (
    UNKNOWN_MODEL,
    draft_of,
    learned,
    opened,
    raising,
    saved,
)

LLAMA = ModelIdentity("llama", "tokenizer-a", "", 100)


@run
async def test_namespaces_are_made_on_first_use_and_are_isolated():
    async with opened() as namespaces:
        assert await namespaces.names() == []
        first = await learned(namespaces, "a", [1, 2, 3, 4])
        second = await learned(namespaces, "b", [1, 2, 3, 5], [9, 1, 2, 3, 5])
        assert await namespaces.names() == ["a", "b"]
        assert draft_of(first, [1, 2, 3], 1) == [4]
        assert draft_of(second, [1, 2, 3], 1) == [5]
        third = await learned(namespaces, "c")
        assert draft_of(third, [1, 2, 3], 1) == []
        session = Session(first, Limits())
        request = pb.DraftRequest(starts=[start(1, [1, 2])], batch=batch({1: [3, 4]}))
        session.answer(request, may_learn=True)
        assert [each.stats.committed for each in (first, second, third)] == [2, 0, 0]
        # Running sequences are isolated, too.
        assert draft_of(second, [3, 4], 1) == []
        # Concurrent callers get the same one.
        assert await namespaces.names() == ["a", "b", "c"]
        again = await asyncio.gather(*(learned(namespaces, name) for name in "add" * 5))
        assert {*again} == {first, namespaces.loaded["d"]}


@run
async def test_without_permission_to_create_namespaces_only_existing_ones_are_used(tmp_path):
    await saved(tmp_path, name="on-disk")
    async with opened(tmp_path, create=False, capacities={"configured": 6000}) as namespaces:
        for number in range(100):
            with pytest.raises(NamespaceError, match=r"there is no namespace 'new-.*', and clients may not create any"):
                await learned(namespaces, f"new-{number}")
        assert (len(namespaces._loading), namespaces._reserved) == (0, {}), "refused names use no memory"
        assert draft_of(await learned(namespaces, "on-disk"), [1, 2, 3], 1) == [4]
        assert (await learned(namespaces, "configured")).corpus.capacity == 6000


@run
async def test_a_client_with_another_vocabulary_is_refused(tmp_path):
    async with opened(tmp_path) as namespaces:

        async def use(model):
            async with namespaces.use("a", model) as namespace:
                return namespace.model

        assert await use(ModelIdentity("llama")) == ModelIdentity("llama")
        assert await use(LLAMA) == LLAMA
        for other, message in (
            (ModelIdentity("llama", "tokenizer-b", "", 100), "belongs to another tokenizer"),
            (ModelIdentity("llama", "tokenizer-a", "", 101), "has a vocabulary of 100 tokens, not 101"),
        ):
            with pytest.raises(IdentityError, match=message):
                await use(other)
        # A client without a model is served, and so is another model with the same vocabulary.
        assert await use(UNKNOWN_MODEL) == await use(ModelIdentity("other", "tokenizer-a")) == LLAMA
        assert namespaces.loaded["a"].active_calls == 0
        await namespaces.save(namespaces.loaded["a"])
    async with opened(tmp_path) as namespaces:
        with pytest.raises(IdentityError, match="belongs to another tokenizer"):
            await use(ModelIdentity("llama", "tokenizer-b"))


@run
async def test_files_that_cannot_be_deleted_are_reported(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, "a", [1, 2, 3, 4])
        await namespaces.save(namespace)

        namespaces.store.delete = raising(PermissionError(13, "Permission denied"))
        with pytest.raises(SnapshotError, match=r"files of namespace 'a' cannot be deleted: .*Permission denied"):
            await namespaces.drop("a")
        assert namespaces.loaded == {}
