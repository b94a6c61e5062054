"""Drafters by name: `--drafter A+B` and its options are read and checked, and the drafters are built.

A name is a kind of `KINDS` or the class of a third party, `package.module:Class`.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, cast

from engine.drafters.kinds import DEFAULT_ADDRESS, KINDS, Resources, runs_model
from ssd.config import DrafterConfig
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.drafters.base import TargetInfo
    from engine.drafters.kinds import AnyDrafter
    from ssd import types

LOG = logging.getLogger(__name__)
GIVEN_BY_FLAGS = {"draft_shape": "--draft-shape", "max_draft": "--max-draft"}
"""Fields of `DrafterConfig` that have their own flag."""


def parse_kinds(text: str) -> list[str]:
    """Split `A+B` into kinds, each a name of `KINDS` or `package.module:Class`.

    Raises UserError for unknown kinds, and for `none` or the same kind twice in a combination.
    """
    kinds = text.split("+")
    for kind in kinds:
        module, separator, name = kind.partition(":")
        if kind not in KINDS and not (separator and module and name):
            raise UserError(f"unknown drafter {kind!r}; give {', '.join(KINDS)}, or package.module:Class")
        if len(kinds) > 1 and (kind == "none" or kinds.count(kind) > 1):
            raise UserError(f"--drafter {text}: each drafter may appear once, and `none` cannot be combined")
    return kinds


def configure(text: str, config: DrafterConfig, options: Mapping[str, str]) -> DrafterConfig:
    """Return `config` with the options of `--drafter-option`; text: as for `parse_kinds`.

    Options that are fields of `DrafterConfig` set them, if one of the kinds reads them; others are stored in
    `config.options`. Raises UserError for an option that none of the kinds has, and for an invalid value.
    """
    kinds = parse_kinds(text)
    known = [KINDS[kind] for kind in kinds if kind in KINDS]
    settings = {each.name for each in fields(DrafterConfig)} - {*GIVEN_BY_FLAGS, "options"}
    settings = settings if any(kind.has_settings for kind in known) else set()
    names = settings.union(*(kind.options for kind in known))
    if len(known) == len(kinds):
        for name in options:
            if name in GIVEN_BY_FLAGS and settings:
                raise UserError(f"drafter option {name}: give {GIVEN_BY_FLAGS[name]} instead")
            if name not in names:
                advice = f"give {', '.join(sorted(names))}" if names else "it has no options"
                raise UserError(f"the drafter {text} has no option {name}; {advice}")
    try:
        given: dict[str, Any] = {name: _converted(config, name, options[name]) for name in options if name in settings}
        others = {name: value for name, value in options.items() if name not in settings}
        return replace(config, **given, options=others)
    except ValueError as problem:
        raise UserError(f"drafter option: {problem}") from None


def check_kind(kind: str, config: DrafterConfig, folder: Path | None, target: Path) -> None:
    """Raise UserError if a kind's options or weights cannot be used; the target's weights are not read.

    config: as returned by `configure`. folder: of the drafter's weights; None for the default of the kind. target:
    folder of the target.
    """
    if kind not in KINDS:
        return
    if KINDS[kind].runs_model:
        from engine.drafters.model_based.build import check_weights

        check_weights(kind, folder, target)
    if (check := KINDS[kind].check) is not None:
        with _naming(kind):
            check(config, target)


def build_drafter(
    name: str,
    config: DrafterConfig,
    target: TargetInfo | None = None,
    *,
    draft_models: Mapping[str, Path] = MappingProxyType({}),
    address: str = DEFAULT_ADDRESS,
    require_sidecar: bool = True,
    warn: Callable[[str], None] = LOG.warning,
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> AnyDrafter:
    """Build the drafter that `name` selects.

    `target` is needed by drafters that use the model, and selects the namespace of a sidecar. `draft_models`,
    `address`, `require_sidecar`, `warn` and `adapters`: see `Resources`. Raises UserError for an unknown name, a class
    that cannot be imported, weights that do not fit the target, or a sidecar that is required and does not answer at
    `address`, or serves another model.
    """
    kinds = parse_kinds(name)
    is_combined = len(kinds) > 1
    resources = Resources(
        target, draft_models, address, require_sidecar, warn, is_combined=is_combined, adapters=adapters
    )
    drafters = [_build_kind(kind, config, resources) for kind in kinds]
    if len(kinds) == 1:
        return drafters[0]
    from engine.drafters.combination.combined import CombinedDrafter, Part
    from engine.drafters.tokens import adapt

    parts = [Part(kind, adapt(drafter), runs_model(kind)) for kind, drafter in zip(kinds, drafters, strict=True)]
    try:
        return CombinedDrafter(parts, has_trees=config.draft_shape == "tree")
    except ValueError as problem:
        raise UserError(f"--drafter {name}: {problem}") from None


def _build_kind(kind: str, config: DrafterConfig, resources: Resources) -> AnyDrafter:
    if kind not in KINDS:
        return _build_third_party(kind, config, resources.target)
    known = KINDS[kind]
    with _naming(kind):
        drafter = known.build(config, resources)
        if not (known.has_corpus and resources.adapters):
            return drafter
        from engine.drafters.by_adapter import MOST_ADAPTERS, AdapterDrafters
        from ssd.corpus.ring import MIN_CAPACITY

        # The corpora of all adapters together are as large as that of the base model.
        capacity = max(MIN_CAPACITY, config.capacity // min(len(resources.adapters), MOST_ADAPTERS))

        def make(adapter: str) -> types.Drafter:
            own = replace(resources, adapter=resources.adapters[adapter])
            return cast("types.Drafter", known.build(replace(config, capacity=capacity), own))

        return AdapterDrafters(cast("types.Drafter", drafter), make)


@contextmanager
def _naming(kind: str) -> Iterator[None]:
    """Convert a ValueError to a UserError that names the kind."""
    try:
        yield
    except ValueError as problem:
        raise UserError(f"--drafter {kind}: {problem}") from None


def _build_third_party(path: str, config: DrafterConfig, target: TargetInfo | None) -> AnyDrafter:
    make = _load_class(path)
    try:
        return make(config, target)
    except Exception as problem:
        LOG.warning("--drafter %s failed to start", path, exc_info=True)
        raise UserError(f"--drafter {path}: {type(problem).__name__}: {problem}") from problem


def _load_class(path: str) -> Callable[[DrafterConfig, TargetInfo | None], AnyDrafter]:
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # Console scripts do not search the current folder, as `python -m` does.
    try:
        loaded = import_module(module)
    except ImportError as problem:
        raise UserError(f"--drafter {path}: {problem}") from None
    if not hasattr(loaded, name):
        raise UserError(f"--drafter {path}: the module {module} has no {name}")
    made: Callable[[DrafterConfig, TargetInfo | None], AnyDrafter] = getattr(loaded, name)
    return made


def _converted(config: DrafterConfig, name: str, text: str) -> object:
    """Return the value of an option, converted to the type of its field."""
    kind = type(getattr(config, name))
    if kind is bool:
        if text not in ("true", "false"):
            raise ValueError(f"{name} must be true or false, not {text!r}")
        return text == "true"
    if kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            raise ValueError(f"{name} must be a number, not {text!r}") from None
    return text
