"""Default namespaces: their names, which of the known ones a model has, and which hold text of its tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from drafter_service.observability.facts import ModelIdentity

MAX_READABLE = 64
"""Maximum number of characters before the digest in the name of a default namespace."""


class KnownNamespace(NamedTuple):
    """What is known of a namespace without loading it."""

    model: ModelIdentity = ModelIdentity()
    """Empty if its description cannot be read."""
    tokens: int | None = None
    """None if it is not known."""
    log_position: str | None = None
    """Position in the shared log up to which it had been read when the namespace was saved; None if it was not."""


def default_name(model: ModelIdentity) -> str:
    """Return the name of a model's default namespace: readable, and unique per vocabulary, configuration and adapter.

    For a client that does not send the configuration it is `name_by_folder`.
    """
    if not model.configuration:
        return name_by_folder(model)
    kind = model.configuration.partition(":")[0]
    return _named(kind, model.vocabulary, model.configuration, model.adapter)


def name_by_folder(model: ModelIdentity) -> str:
    """Return the name that versions up to 0.2.0 gave to the default namespace, which depends on the model's folder."""
    if not (model.name or model.tokenizer or model.adapter):
        return "default"
    return _named(model.name.rstrip("/").rpartition("/")[2], model.name, model.tokenizer, model.adapter)


def _named(readable: str, *parts: str) -> str:
    digest = hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", readable)[:MAX_READABLE].strip(".-")
    return f"{readable or 'model'}-{digest}"


def is_default(name: str, model: ModelIdentity) -> bool:
    """Return whether a namespace is the default one of its model, by its new or old name."""
    return name in (default_name(model), name_by_folder(model))


def find_default(
    model: ModelIdentity,
    known: Mapping[str, KnownNamespace],
    may_use: Callable[[str], bool] = lambda _: True,
    configured: Collection[str] = (),
) -> str:
    """Return the default namespace of a model for a caller, who may have no right to use it.

    A namespace with an old name keeps it, so that rights, settings and logs that name it still apply, and serves
    the model whatever its folder is called. An empty one is the default only if no other of the model has text; of
    several with other folders' names it is the largest. configured: names in the settings, which need not exist, and
    apply although they are empty.
    """
    own, old = default_name(model), name_by_folder(model)
    named = [
        name
        for name in (old, own)
        if may_use(name)
        and (name in known or name in configured)
        and not (name in known and _contradicts(known[name].model, model))
    ]
    others = sorted(
        (
            name
            for name, (owner, *_) in known.items()
            # Those of cache salts, of which there may be tens of thousands, have "@" in their names.
            if "@" not in name and _is_same(owner, model) and is_default(name, owner) and may_use(name)
        ),
        key=lambda name: (-(known[name].tokens or 0), name),
    )

    def is_empty(name: str) -> bool:
        return name not in configured and known[name].tokens == 0

    # Rights may have been given for the old name.
    return min([*named, *others], key=is_empty, default=old if may_use(old) and not may_use(own) else own)


def _contradicts(one: ModelIdentity, other: ModelIdentity) -> bool:
    """Return whether two models are known to be different ones."""
    if one.configuration and other.configuration:
        return (one.vocabulary, one.configuration) != (other.vocabulary, other.configuration)
    return bool(one.vocab_size and other.vocab_size and one.vocab_size != other.vocab_size)


def _is_same(one: ModelIdentity, other: ModelIdentity) -> bool:
    """Return whether two models are known to be the same, by their content or else by name and tokenizer."""
    if one.adapter != other.adapter or _contradicts(one, other):
        return False
    return bool(one.configuration and other.configuration) or (one.name == other.name and one.has_tokenizer_of(other))


def find_other(
    name: str,
    model: ModelIdentity,
    known: Mapping[str, KnownNamespace],
    may_use: Callable[[str], bool] = lambda _: True,
) -> str:
    """Return the largest other namespace with text of a model's tokenizer that a caller may use, "" without one.

    Those of cache salts, which have "@" in their names, are left out: on purpose they share their text with nobody.
    """
    sizes = {
        other: tokens or 0
        for other, (owner, tokens, _) in known.items()
        if "@" not in other and tokens != 0 and owner.has_tokenizer_of(model) and other != name and may_use(other)
    }
    return max(sizes, key=lambda other: (sizes[other], other), default="")
