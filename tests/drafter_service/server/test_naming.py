"""Default namespaces: the same for copies of a model, and the old ones of a sidecar, with its rights and settings."""

import json
from dataclasses import replace

import pytest

from drafter_service.auth.callers import EVERYBODY, Caller, Right
from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.naming import (
    KnownNamespace,
    default_name,
    find_default,
    find_other,
    is_default,
    name_by_folder,
)
from drafter_service.server.store import DESCRIPTION
from tests.drafter_service.guarded import run
from tests.drafter_service.server.opened_namespaces import draft_of, learned, opened

BASE = ModelIdentity("owner/Base-1B", "sha-of-file", "", 500, "vocabulary", "llama:shape")
COPY = replace(BASE, name="copy")
REFORMATTED = replace(COPY, tokenizer="sha-of-another-file")
LARGE = replace(BASE, name="Base-8B", configuration="llama:larger")
OTHER_TOKENIZER = replace(BASE, vocabulary="other", tokenizer="other")
OF_OLD_CLIENT = replace(BASE, vocabulary="", configuration="")
COPIES = [replace(BASE, name=f"copy-{number}") for number in range(3)]
COPIED = [name_by_folder(copy) for copy in COPIES]
OLD, NEW, ELSEWHERE = name_by_folder(BASE), default_name(BASE), name_by_folder(COPY)


@pytest.mark.parametrize(
    ("model", "expected"),
    [
        (ModelIdentity(), "default"),
        (ModelIdentity("org/Some Model!"), "Some-Model-"),
        (ModelIdentity("", "abc"), "model-"),
        (ModelIdentity("x" * 200), "x" * 64 + "-"),
        (BASE, "llama-"),
        (OF_OLD_CLIENT, "Base-1B-"),
    ],
)
def test_the_default_namespace_is_readable(model, expected):
    assert default_name(model).startswith(expected)


def test_the_default_namespace_follows_from_the_content():
    assert default_name(COPY) == default_name(REFORMATTED) == NEW
    names = {default_name(each) for each in (BASE, LARGE, OTHER_TOKENIZER, replace(BASE, adapter="lora"))}
    assert len(names) == 4
    assert default_name(OF_OLD_CLIENT) == OLD == name_by_folder(BASE) != NEW
    assert [is_default(name, BASE) for name in (OLD, NEW, "chat")] == [True, True, False]


@pytest.mark.parametrize(
    ("known", "model", "expected"),
    [
        ({}, BASE, NEW),
        ({NEW: BASE}, REFORMATTED, NEW),
        # An old namespace, before and after it got the configuration of a client.
        ({OLD: OF_OLD_CLIENT}, BASE, OLD),
        ({OLD: ModelIdentity()}, BASE, OLD),
        ({OLD: BASE}, REFORMATTED, OLD),
        ({OLD: BASE, NEW: BASE}, BASE, OLD),
        ({OLD: BASE, NEW: BASE}, COPY, NEW),
        # A copy does not know the old name, and nothing says that the model was the same one.
        ({OLD: OF_OLD_CLIENT}, COPY, NEW),
        # Clients that do not send the configuration.
        ({NEW: BASE}, OF_OLD_CLIENT, NEW),
        ({NEW: BASE}, replace(OF_OLD_CLIENT, name="copy"), name_by_folder(COPY)),
        # Another model in a folder of the same name.
        ({OLD: LARGE}, BASE, NEW),
        ({OLD: replace(OF_OLD_CLIENT, vocab_size=501)}, BASE, NEW),
        ({OLD: BASE}, replace(BASE, adapter="lora"), default_name(replace(BASE, adapter="lora"))),
        # A namespace that was given a name is nobody's default.
        ({"chat": BASE}, BASE, NEW),
    ],
)
def test_the_old_namespace_of_a_model_is_found(known, model, expected):
    assert find_default(model, {name: KnownNamespace(owner, 5) for name, owner in known.items()}) == expected


def of_copies(*tokens):
    """Return the namespaces of three copies of a model's folder, with these numbers of tokens."""
    return {name: (copy, size) for name, copy, size in zip(COPIED, COPIES, tokens, strict=True)}


@pytest.mark.parametrize(
    ("model", "known", "configured", "expected"),
    [
        (BASE, {NEW: (BASE, 0), ELSEWHERE: (COPY, 1)}, (), ELSEWHERE),
        (BASE, {NEW: (BASE, 1), ELSEWHERE: (COPY, 9)}, (), NEW),
        (BASE, {NEW: (BASE, 0), ELSEWHERE: (COPY, 0)}, (), NEW),
        (BASE, {NEW: (BASE, 1), OLD: (BASE, 0)}, (), NEW),
        (BASE, {NEW: (BASE, 1), OLD: (BASE, None)}, (), OLD),
        # Settings that name it apply before and after it exists.
        (BASE, {ELSEWHERE: (COPY, 1)}, {NEW}, NEW),
        (BASE, {NEW: (BASE, 0), ELSEWHERE: (COPY, 1)}, {NEW}, NEW),
        (BASE, {}, {OLD}, OLD),
        (COPY, {}, {OLD}, NEW),
        (BASE, {OLD: (LARGE, None)}, {OLD}, NEW),
        # Of several with old names, the largest.
        (BASE, of_copies(9, 1, 2), (), COPIED[0]),
        (BASE, of_copies(0, 9, 2), (), COPIED[1]),
        (BASE, of_copies(0, 1, 9), (), COPIED[2]),
        (BASE, of_copies(5, 5, 5), (), min(COPIED)),
        (BASE, of_copies(0, None, 0), (), COPIED[1]),
    ],
)
def test_an_empty_namespace_is_the_default_only_if_no_other_has_text_or_settings_name_it(
    model, known, configured, expected
):
    namespaces = {name: KnownNamespace(*each) for name, each in known.items()}
    assert find_default(model, namespaces, configured=configured) == expected


@run
async def test_calls_that_learn_and_calls_that_draft_have_the_same_default():
    """A caller may only learn in the namespace that an old name has."""
    caller = Caller("writer", (OLD,), Right.LEARN)
    reader = Caller("reader", (OLD,), Right.READ)
    async with opened() as namespaces:
        await learned(namespaces, OLD, [1, 2, 3])
        assert namespaces.default_of(BASE, caller) == namespaces.default_of(BASE, reader) == OLD
        assert namespaces.default_of(BASE, Caller("other", ("*",), Right.ADMIN)) == NEW


def test_text_of_the_same_tokenizer_is_found_elsewhere():
    known = {
        "empty": KnownNamespace(BASE, 0),
        "own": KnownNamespace(BASE, 0),
        "large": KnownNamespace(LARGE, 10),
        "larger": KnownNamespace(replace(OF_OLD_CLIENT, name="x"), 20),
        "a@salt": KnownNamespace(BASE, 99),
        "foreign": KnownNamespace(OTHER_TOKENIZER, 99),
        "unknown": KnownNamespace(),
    }
    assert find_other("own", BASE, known) == "larger"
    assert find_other("own", REFORMATTED, known) == "large"
    assert find_other("own", BASE, {"on disk": KnownNamespace(BASE, None)}) == "on disk"
    assert find_other("own", BASE, {"own": KnownNamespace(BASE, 5)}) == ""
    assert find_other("own", ModelIdentity(), known) == ""


def test_namespaces_of_cache_salts_are_not_looked_at():
    def asked(name):
        names.append(name)
        return True

    known = {f"{NEW}@{number}": KnownNamespace(None, 5) for number in range(100)}  # No identity, so none is read.
    names = []
    assert find_default(BASE, {**known, ELSEWHERE: KnownNamespace(COPY, 5)}, asked) == ELSEWHERE
    assert find_other("own", BASE, {**known, "chat": KnownNamespace(BASE, 5)}, asked) == "chat"
    assert {*names} == {OLD, NEW, ELSEWHERE, "chat"}


@run
async def test_namespaces_of_earlier_versions_are_known_after_a_restart(tmp_path):
    async with opened(tmp_path) as namespaces:
        namespace = await learned(namespaces, OLD, [1, 2, 3])
        namespace.adopt(OF_OLD_CLIENT)
        await namespaces.save(namespace)
    file = tmp_path / OLD / DESCRIPTION
    description = json.loads(file.read_text())
    for name in ("vocabulary", "configuration"):
        del description["model"][name]
    del description["tokens"]
    file.write_text(json.dumps(description))
    async with opened(tmp_path) as namespaces:
        assert namespaces.known() == {OLD: KnownNamespace(OF_OLD_CLIENT, None)}
        name = namespaces.default_of(BASE, EVERYBODY)
        assert name == OLD
        async with namespaces.use(name, BASE) as namespace:
            assert draft_of(namespace, [1, 2], 1) == [3]
            assert namespaces.held(namespace, lambda _: True).tokens == 4
            await namespaces.save(namespace)
    async with opened(tmp_path) as namespaces:
        assert namespaces.known() == {OLD: KnownNamespace(BASE, 4)}
        assert namespaces.default_of(COPY, EVERYBODY) == OLD
        await namespaces.drop(OLD)
        assert namespaces.default_of(BASE, EVERYBODY) == NEW


def test_rights_decide_which_name_is_used():
    def found(*known, rights):
        return find_default(BASE, {name: KnownNamespace(BASE) for name in known}, lambda name: name.startswith(rights))

    # Those to the old name remain without a namespace of this name, too.
    assert found(rights="Base-") == found(OLD, rights="Base-") == found(NEW, rights="Base-") == OLD
    assert found(rights="llama-") == found(OLD, rights="llama-") == NEW
    assert found(rights=("Base-", "llama-")) == found(rights="nothing") == NEW
    assert find_other("own", BASE, {"theirs": KnownNamespace(BASE, 5)}, lambda _: False) == ""
