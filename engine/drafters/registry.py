"""Drafters by name: the table of kinds, and how `--drafter A+B` and its options are read, checked and built.

A name is a kind of `KINDS` or the class of a third party, `package.module:Class`. A drafter's module is imported only
when it is built.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, cast

from engine.drafters.options import (
    DEFAULT_ADDRESS,
    LookaheadOptions,
    NetworkOptions,
    RemoteOptions,
    Resources,
    RestOptions,
    converted,
    read_options,
)
from ssd.config import DrafterConfig
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.drafters.base import Drafter, TargetInfo
    from ssd import types

    AnyDrafter = Drafter | types.Drafter
    """A drafter with either interface; `engine.drafters.tokens.adapt` converts it to the engine's."""

LOG = logging.getLogger(__name__)
DEPTH = "depth"
"""Option of the kinds that run a network."""
SNAPSHOT_PATH = "path"
"""Option of `rest`."""
MAKE_SNAPSHOT = "ssd-drafter warm --tokenizer MODEL --from FILES --snapshot SNAPSHOT"
"""Command that makes a snapshot, for error messages."""
GIVEN_BY_FLAGS = {"draft_shape": "--draft-shape", "max_draft": "--max-draft"}
"""Fields of `DrafterConfig` that have their own flag."""


@dataclass(frozen=True)
class DrafterKind:
    """One kind of drafter."""

    help: str
    """Short description of what it drafts from."""
    build: Callable[[DrafterConfig, Resources], AnyDrafter]
    has_settings: bool = False
    """Whether it reads the fields of `DrafterConfig`, so that they may be given as options."""
    options: type | None = None
    """A dataclass of its own options, which are given in `DrafterConfig.options`; None: it has none."""
    remembers: bool = False
    """Whether earlier requests improve the drafts of later ones."""
    has_corpus: bool = False
    """Whether it drafts from earlier requests' text; then each LoRA adapter gets a drafter of its own."""
    runs_model: bool = False
    """Whether it runs a network, so that it needs the target and weights."""
    check: Callable[[DrafterConfig, Path], object] = lambda _config, _target: None
    """Raises UserError or ValueError for files that cannot be used with the target in a folder, before the target is
    loaded."""

    @property
    def option_names(self) -> set[str]:
        """Names of its own options."""
        return set() if self.options is None else {each.name for each in fields(self.options)}


def _none(_config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from ssd.baselines.none import NoDrafter

    return NoDrafter()


def _ngram(_config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from ssd.baselines.ngram import NgramDrafter

    return NgramDrafter()


def _ssd(config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from ssd.drafter import SuffixDrafter

    return SuffixDrafter(config, sorts_in_thread=True)


def _ssd_remote(config: DrafterConfig, resources: Resources) -> AnyDrafter:
    from engine.drafters.remote import connect

    return connect(config, read_options(RemoteOptions, config.options), resources)


def _classic(config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from ssd.baselines.classic import ClassicDrafter

    return ClassicDrafter(config)


def _lookahead(config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from engine.drafters.lookahead import LookaheadDrafter

    sizes = read_options(LookaheadOptions, config.options)
    return LookaheadDrafter(sizes, has_trees=config.draft_shape == "tree")


def _vocab_size(resources: Resources) -> int:
    if resources.target is None:
        raise ValueError("it needs the target's vocabulary")
    return resources.target.vocab_size


def _recycle(config: DrafterConfig, resources: Resources) -> AnyDrafter:
    from engine.drafters.recycle import RecycleDrafter

    return RecycleDrafter(_vocab_size(resources), has_trees=config.draft_shape == "tree")


def _rest(config: DrafterConfig, resources: Resources) -> AnyDrafter:
    from engine.drafters.rest import RestDrafter, load_corpus

    return RestDrafter(config, load_corpus(_snapshot_path(config), _vocab_size(resources)))


def _check_rest(config: DrafterConfig, target: Path) -> None:
    from engine.drafters.rest import check_snapshot
    from engine.models.loader import load_config

    check_snapshot(_snapshot_path(config), load_config(target).vocab_size)


def _snapshot_path(config: DrafterConfig) -> Path:
    path = read_options(RestOptions, config.options).path
    if path is None:
        raise ValueError(
            f"it needs a corpus; give --drafter-option {SNAPSHOT_PATH}=SNAPSHOT, which `{MAKE_SNAPSHOT}` makes"
        )
    return path


def _network(kind: str, text: str) -> DrafterKind:
    """Return the kind of a drafter that runs a network."""

    def build(config: DrafterConfig, resources: Resources) -> AnyDrafter:
        from engine.drafters.build import build_model_drafter

        depth = min(read_options(NetworkOptions, config.options).depth, config.max_draft)
        return build_model_drafter(kind, depth, resources, has_trees=config.draft_shape == "tree")

    return DrafterKind(text, build, options=NetworkOptions, runs_model=True)


KINDS: Mapping[str, DrafterKind] = {
    "none": DrafterKind("plain decoding, without drafts", _none),
    "ngram": DrafterKind("prompt lookup in the request's own text", _ngram),
    "ssd": DrafterKind(
        "all earlier requests and the request's own text", _ssd, has_settings=True, remembers=True, has_corpus=True
    ),
    "ssd-remote": DrafterKind(
        "the same as ssd, in a sidecar at --address",
        _ssd_remote,
        options=RemoteOptions,
        remembers=True,
        has_corpus=True,
    ),
    "classic": DrafterKind(
        "the most frequent continuation of the last 10 tokens or fewer, a baseline",
        _classic,
        has_settings=True,
        remembers=True,
        has_corpus=True,
    ),
    "draft-model": _network("draft-model", "a smaller model with the same vocabulary"),
    "self-int8": _network("self-int8", "an int8 copy of the target"),
    "mtp": _network("mtp", "multi-token prediction layer of DeepSeek, MiMo or Qwen"),
    "eagle": _network("eagle", "EAGLE-1 or EAGLE-2 head"),
    "eagle3": _network("eagle3", "EAGLE-3 head"),
    "medusa": _network("medusa", "Medusa heads"),
    "lookahead": DrafterKind(
        "n-grams that the target produces in extra rows of its batch, and those of the request's own text",
        _lookahead,
        options=LookaheadOptions,
    ),
    "recycle": DrafterKind("a table of the target's most likely successors of each token", _recycle, remembers=True),
    "rest": DrafterKind(
        "a read-only corpus, --drafter-option path=SNAPSHOT, and the request's own text",
        _rest,
        has_settings=True,
        options=RestOptions,
        check=_check_rest,
    ),
}
"""Drafter kinds by their `--drafter` name."""


def describe_kinds() -> str:
    """Return one line that lists all kinds with their descriptions."""
    return "; ".join(f"{name}: {kind.help}" for name, kind in KINDS.items())


def runs_model(kind: str) -> bool:
    """Return whether a kind runs a network."""
    return kind in KINDS and KINDS[kind].runs_model


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
    names = settings.union(*(kind.option_names for kind in known))
    if len(known) == len(kinds):
        for name in options:
            if name in GIVEN_BY_FLAGS and settings:
                raise UserError(f"drafter option {name}: give {GIVEN_BY_FLAGS[name]} instead")
            if name not in names:
                advice = f"give {', '.join(sorted(names))}" if names else "it has no options"
                raise UserError(f"the drafter {text} has no option {name}; {advice}")
    try:
        given = {name: value for name, value in options.items() if name in settings}
        others = {name: value for name, value in options.items() if name not in settings}
        return replace(config, **converted(DrafterConfig, given), options=others)
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
        from engine.drafters.build import check_weights

        check_weights(kind, folder, target)
    with _naming(kind):
        if (options := KINDS[kind].options) is not None:
            read_options(options, config.options)
        KINDS[kind].check(config, target)


def build_drafter(
    name: str,
    config: DrafterConfig,
    target: TargetInfo | None = None,
    *,
    draft_models: Mapping[str, Path] = MappingProxyType({}),
    address: str = DEFAULT_ADDRESS,
    require_sidecar: bool = True,
    warn: Callable[[str], None] = LOG.warning,
    notify: Callable[[str], None] = LOG.info,
    adapters: Mapping[str, Path] = MappingProxyType({}),
) -> AnyDrafter:
    """Build the drafter that `name` selects.

    `target` is needed by drafters that use the model, and selects the namespace of a sidecar. The others: see
    `Resources`. Raises UserError for an unknown name, a class that cannot be imported, weights that do not fit the
    target, or a sidecar that is required and does not answer at `address`, or serves another model.
    """
    kinds = parse_kinds(name)
    is_combined = len(kinds) > 1
    resources = Resources(
        target, draft_models, address, require_sidecar, warn, notify, is_combined=is_combined, adapters=adapters
    )
    drafters = [_build_kind(kind, config, resources) for kind in kinds]
    if len(kinds) == 1:
        return drafters[0]
    from engine.drafters.combined import CombinedDrafter, Component
    from engine.drafters.tokens import adapt

    parts = [Component(kind, adapt(drafter), runs_model(kind)) for kind, drafter in zip(kinds, drafters, strict=True)]
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
    module, _, name = path.partition(":")
    if "" not in sys.path:
        sys.path.insert(0, "")  # Console scripts do not search the current folder, as `python -m` does.
    try:
        make = getattr(import_module(module), name, None)
    except ImportError as problem:
        raise UserError(f"--drafter {path}: {problem}") from None
    if make is None:
        raise UserError(f"--drafter {path}: the module {module} has no {name}")
    try:
        drafter: AnyDrafter = make(config, target)
    except Exception as problem:
        LOG.warning("--drafter %s failed to start", path, exc_info=True)
        raise UserError(f"--drafter {path}: {type(problem).__name__}: {problem}") from problem
    return drafter
