"""Namespaces that are made, used and dropped, and those that read others, their libraries."""

import asyncio

import grpc
import pytest

from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.namespace import IdentityError
from drafter_service.server.namespaces import MemoryLimitError, NamespaceError
from drafter_service.server.session import Session
from drafter_service.settings.tree import AccessConfig, Limits, NamespacesConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import PROTOCOL
from ssd.corpus.sections import SnapshotError
from tests.drafter_service.guarded import caller_entry, run
from tests.drafter_service.raw import batch, connected, counted, drafted, eventually, start
from tests.drafter_service.server.opened_namespaces import (
    DRAFTING,
    UNKNOWN_MODEL,
    draft_of,
    learned,
    opened,
    raising,
    saved,
)
from tests.servers import serving

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


TEXT = counted(100)
READS = {"reads": {"tenant": ("library", "base"), "base": ("library",)}}


async def draft_in(namespaces, name, context, model=UNKNOWN_MODEL):
    """Return a draft in a stream of a namespace."""
    async with namespaces.use_for_drafts(name, model) as namespace:
        return draft_of(namespace, context)


@run
async def test_a_namespace_drafts_from_its_libraries_and_no_other_from_it():
    async with opened(reads={**READS["reads"], "reader": ("base",)}) as namespaces:
        await learned(namespaces, "library", TEXT)
        await learned(namespaces, "other", counted(500))
        assert await draft_in(namespaces, "tenant", TEXT[:8]) == TEXT[8:11]
        assert await draft_in(namespaces, "tenant", counted(500)[:8]) == []
        assert await draft_in(namespaces, "other", TEXT[:8]) == []
        assert await draft_in(namespaces, "reader", TEXT[:8]) == [], "libraries of a library are not read"
        await learned(namespaces, "tenant", counted(900))
        for name in ("library", "base", "other"):
            assert await draft_in(namespaces, name, counted(900)[:8]) == []


@run
async def test_a_library_stays_loaded_while_a_stream_may_draft_from_it(tmp_path):
    async with opened(tmp_path, fit=3, **READS) as namespaces:
        await learned(namespaces, "library", TEXT)
        async with namespaces.use_for_drafts("tenant", UNKNOWN_MODEL):
            assert sorted(namespaces.loaded) == ["base", "library", "tenant"]
            assert namespaces.loaded["tenant"].facts().libraries == ("library", "base")
            with pytest.raises(MemoryLimitError):
                await learned(namespaces, "other")
        tenant = await learned(namespaces, "tenant")
        await learned(namespaces, "other")
        # The tenant keeps no reference to the memory of an unloaded library, which is loaded again for its streams.
        assert sorted(namespaces.loaded) == ["library", "other", "tenant"]
        assert tenant.libraries == ["library"]
        assert tenant.corpus.libraries == (namespaces.loaded["library"].corpus,)
        assert await draft_in(namespaces, "tenant", TEXT[:8]) == TEXT[8:11]
        assert namespaces.loaded["tenant"].libraries == ["library", "base"]


@run
async def test_a_dropped_library_is_read_again_once_it_exists_again():
    async with opened(**READS) as namespaces:
        await learned(namespaces, "library", TEXT)
        async with namespaces.use_for_drafts("tenant", UNKNOWN_MODEL) as tenant:
            await namespaces.drop("library")
            assert draft_of(tenant, TEXT[:8]) == []
            assert tenant.libraries == ["base"]
            await learned(namespaces, "library", counted(500))
            assert draft_of(tenant, counted(500)[:8]) == counted(500)[8:11]


@run
async def test_dropped_namespaces_use_no_memory():
    async with opened() as namespaces:
        await learned(namespaces, "a", TEXT)
        await namespaces.drop("a")
        assert (len(namespaces._loading), namespaces._reserved, namespaces._readers) == (0, {}, {})


@run
async def test_a_library_of_another_tokenizer_is_refused():
    ours, theirs = ModelIdentity(tokenizer="ours", vocab_size=1000), ModelIdentity(tokenizer="theirs", vocab_size=1000)
    async with opened(**READS) as namespaces:
        await learned(namespaces, "library", TEXT)
        async with namespaces.use_for_drafts("tenant", ours) as tenant:
            assert draft_of(tenant, TEXT[:8]) == TEXT[8:11]
            # A reader says nothing about the library's own tokenizer.
            async with namespaces.use("library", theirs):
                assert tenant.libraries == []
                assert draft_of(tenant, TEXT[:8]) == []
        with pytest.raises(IdentityError, match="namespace 'library' belongs to another tokenizer"):
            await draft_in(namespaces, "tenant", TEXT[:8], ours)


@pytest.mark.parametrize("reads", [{"a": ("a",)}, {"a": ("b",), "b": ("c",), "c": ("a",)}])
def test_a_namespace_cannot_read_itself(reads):
    with pytest.raises(ValueError, match="namespace 'a' would read itself"):
        NamespacesConfig(reads=reads)


def test_a_tenant_needs_no_rights_in_its_libraries(tmp_path, socket_address):
    callers = tmp_path / "callers.toml"
    callers.write_text(
        caller_entry("tenant", "tenant", "read", "learn", "admin") + caller_entry("operator", "library", "learn")
    )
    namespaces = NamespacesConfig(create=False, capacities={"tenant": 5000}, reads={"tenant": ("library",)})
    with (
        serving(listen=socket_address, access=AccessConfig(callers=callers), namespaces=namespaces),
        connected(socket_address, (("authorization", "Bearer tenant"),)) as tenant,
        connected(socket_address, (("authorization", "Bearer operator"),)) as operator,
    ):
        operator.observe("library", TEXT)

        def draft():
            stream = tenant.stream("tenant")
            tokens = drafted(stream.exchange(starts=[start(1, TEXT[:8], learn=False)], batch=batch({1: ()}, 3)))
            stream.end()
            return tokens

        assert eventually(draft) == TEXT[8:11]
        for method in ("Report", "Observe", "Forget", "DropNamespace"):
            assert tenant.refusal(method, namespace="library")[0].name == "PERMISSION_DENIED"


def test_a_follower_writes_nothing(socket_address):
    """A copy of a library may be of another model with the same tokenizer."""
    theirs = pb.Model(name="theirs", tokenizer="same", vocab_size=1000, configuration="theirs")

    def follow(caller, model):
        return next(iter(caller.call("Follow", protocol=PROTOCOL, namespace="library", model=model)))

    with serving(listen=socket_address, drafting=DRAFTING), connected(socket_address) as caller:
        follow(caller, theirs)
        caller.observe("library", TEXT, model=pb.Model(tokenizer="same", vocab_size=1000))
        follow(caller, theirs)
        (library,) = caller.call("ListNamespaces").namespaces
        assert library.model == pb.Model(tokenizer="same", vocab_size=1000)
        with pytest.raises(grpc.RpcError, match="belongs to another tokenizer") as refused:
            follow(caller, pb.Model(tokenizer="other", vocab_size=1000))
        assert refused.value.code().name == "FAILED_PRECONDITION"
