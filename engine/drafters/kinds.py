"""Table of drafter kinds, used by `--drafter`, its help, error messages, tests and benchmarks.

A drafter's module is imported only when it is built.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ssd.config import DrafterConfig

if TYPE_CHECKING:
    from engine.drafters.base import Drafter, TargetInfo
    from ssd import types

    AnyDrafter = Drafter | types.Drafter
    """A drafter with either interface; `engine.drafters.tokens.adapt` converts it to the engine's."""

LOG = logging.getLogger(__name__)
DEFAULT_ADDRESS = "unix:/tmp/ssd-drafter.sock"
REMOTE_DEADLINE_S = 0.01
"""Longest time that a step waits for a remote drafter, in seconds; a fraction of a step on a CPU."""
DEADLINE = "deadline_s"
"""Option of `ssd-remote`: another such time."""
DRAFTING = "drafting"
"""Option of `ssd-remote`: where drafts are made, `sidecar` or `replica`, a copy of its corpus in this process."""
DEPTH = "depth"
"""Option of the kinds that run a network: the largest number of draft positions."""
SNAPSHOT_PATH = "path"
"""Option of `rest`: the snapshot of its corpus."""
MAKE_SNAPSHOT = "ssd-drafter warm --tokenizer MODEL --from FILES --snapshot SNAPSHOT"
"""Command that makes a snapshot, for error messages."""


@dataclass(frozen=True)
class Resources:
    """What drafters are built from, besides their settings."""

    target: TargetInfo | None = None
    """The target; some drafters do not need it."""
    draft_models: Mapping[str, Path] = field(default_factory=dict)
    """Folders of weights by kind."""
    address: str = DEFAULT_ADDRESS
    """Address of a sidecar."""
    require_sidecar: bool = True
    """Whether a sidecar must answer at the start; otherwise there are no drafts until one does."""
    warn: Callable[[str], None] = LOG.warning
    """Called whenever the connection to the sidecar is lost, and when it is restored; meanwhile the engine runs without
    drafts."""
    is_combined: bool = False
    """Whether several drafters are built whose drafts are merged."""
    adapters: Mapping[str, Path] = field(default_factory=dict)
    """Folders of the LoRA adapters that requests may choose, by name."""
    adapter: Path | None = None
    """Folder of the LoRA adapter whose requests the drafter serves; None: requests without one."""


@dataclass(frozen=True)
class Kind:
    """One kind of drafter."""

    help: str
    """Short description of what it drafts from."""
    build: Callable[[DrafterConfig, Resources], AnyDrafter]
    has_settings: bool = False
    """Whether it reads the fields of `DrafterConfig`, so that they may be given as options."""
    options: tuple[str, ...] = ()
    """Further options, which it reads from `DrafterConfig.options`."""
    remembers: bool = False
    """Whether earlier requests improve the drafts of later ones."""
    has_corpus: bool = False
    """Whether it drafts from earlier requests' text; then each LoRA adapter gets a drafter of its own."""
    runs_model: bool = False
    """Whether it runs a network, so that it needs the target and weights."""
    check: Callable[[DrafterConfig, Path], None] | None = None
    """Raises UserError or ValueError for options that cannot be used with the target in a folder, before the target is
    loaded."""


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
    from drafter_service.client import DrafterClient
    from drafter_service.client.connection import AbsentError
    from drafter_service.client.identity import model_identity

    # The service keeps one namespace for each model and adapter.
    folder = None if resources.target is None else resources.target.folder
    address, warn = resources.address, resources.warn
    kind: Callable[..., DrafterClient] = DrafterClient
    if _has_replica(config):
        from drafter_service.client.replica import ReplicaClient

        kind = partial(ReplicaClient, config=replace(config, options={}), max_tokens=config.capacity)
    connect = partial(
        kind,
        address,
        deadline_s=_deadline_s(config),
        model=None if folder is None else model_identity(folder, adapter=resources.adapter),
        host="ssd-engine",
        draft_shape=config.draft_shape,
        on_lost=lambda reason: warn(
            f"no connection to the drafter at {address} ({reason}); continuing without drafts until there is one"
        ),
        on_resumed=lambda: warn(f"reconnected to the drafter at {address}; drafting resumes"),
    )
    if resources.adapter is not None:
        # This drafter is made while requests run, so nothing may wait for its connection.
        return connect(required=False)
    try:
        return connect()
    except AbsentError:
        if resources.require_sidecar:
            raise
        return connect(required=False)


def _deadline_s(config: DrafterConfig) -> float:
    text = config.options.get(DEADLINE, str(REMOTE_DEADLINE_S))
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < math.inf:
        raise ValueError(f"{DEADLINE} must be a number of seconds, not {text!r}")
    return seconds


def _has_replica(config: DrafterConfig) -> bool:
    where = config.options.get(DRAFTING, "sidecar")
    if where not in ("sidecar", "replica"):
        raise ValueError(f"{DRAFTING} must be 'sidecar' or 'replica', not {where!r}")
    return where == "replica"


def _check_ssd_remote(config: DrafterConfig, _target: Path) -> None:
    _deadline_s(config)
    _has_replica(config)


def _classic(config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from ssd.baselines.classic import ClassicDrafter

    return ClassicDrafter(config)


def _lookahead(config: DrafterConfig, _resources: Resources) -> AnyDrafter:
    from engine.drafters.model_free.lookahead import LookaheadDrafter, LookaheadSizes

    return LookaheadDrafter(LookaheadSizes.of(config.options), has_trees=config.draft_shape == "tree")


def _recycle(config: DrafterConfig, resources: Resources) -> AnyDrafter:
    from engine.drafters.model_free.recycle import RecycleDrafter

    if resources.target is None:
        raise ValueError("it needs the target's vocabulary")
    return RecycleDrafter(resources.target.vocab_size, has_trees=config.draft_shape == "tree")


def _check_lookahead(config: DrafterConfig, _target: Path) -> None:
    from engine.drafters.model_free.lookahead import LookaheadSizes

    LookaheadSizes.of(config.options)


def _rest(config: DrafterConfig, resources: Resources) -> AnyDrafter:
    from engine.drafters.model_free.rest import RestDrafter, load_corpus

    if resources.target is None:
        raise ValueError("it needs the target's vocabulary")
    return RestDrafter(config, load_corpus(_snapshot_path(config), resources.target.vocab_size))


def _check_rest(config: DrafterConfig, target: Path) -> None:
    from engine.drafters.model_free.rest import check_snapshot
    from engine.models.loader import load_config

    check_snapshot(_snapshot_path(config), load_config(target).vocab_size)


def _snapshot_path(config: DrafterConfig) -> Path:
    if SNAPSHOT_PATH not in config.options:
        raise ValueError(
            f"it needs a corpus; give --drafter-option {SNAPSHOT_PATH}=SNAPSHOT, which `{MAKE_SNAPSHOT}` makes"
        )
    return Path(config.options[SNAPSHOT_PATH])


def _running(kind: str) -> Callable[[DrafterConfig, Resources], AnyDrafter]:
    """Return the function that builds a drafter which runs a network."""

    def build(config: DrafterConfig, resources: Resources) -> AnyDrafter:
        from engine.drafters.model_based.build import build_model_drafter

        folder = resources.draft_models.get(kind)
        return build_model_drafter(kind, config, resources.target, folder, is_combined=resources.is_combined)

    return build


def _check_depth(config: DrafterConfig, _target: Path) -> None:
    from engine.drafters.model_based.build import draft_depth

    draft_depth(config)


RUNS_MODEL: Any = {"options": (DEPTH,), "runs_model": True, "check": _check_depth}

KINDS: Mapping[str, Kind] = {
    "none": Kind("plain decoding, without drafts", _none),
    "ngram": Kind("prompt lookup in the request's own text", _ngram),
    "ssd": Kind(
        "all earlier requests and the request's own text", _ssd, has_settings=True, remembers=True, has_corpus=True
    ),
    "ssd-remote": Kind(
        "the same as ssd, in a sidecar at --address",
        _ssd_remote,
        options=(DEADLINE, DRAFTING),
        remembers=True,
        has_corpus=True,
        check=_check_ssd_remote,
    ),
    "classic": Kind(
        "the most frequent continuation of the last 10 tokens or fewer, a baseline",
        _classic,
        has_settings=True,
        remembers=True,
        has_corpus=True,
    ),
    "draft-model": Kind("a smaller model with the same vocabulary", _running("draft-model"), **RUNS_MODEL),
    "self-int8": Kind("an int8 copy of the target", _running("self-int8"), **RUNS_MODEL),
    "mtp": Kind("multi-token prediction layer of DeepSeek, MiMo or Qwen", _running("mtp"), **RUNS_MODEL),
    "eagle": Kind("EAGLE-1 or EAGLE-2 head", _running("eagle"), **RUNS_MODEL),
    "eagle3": Kind("EAGLE-3 head", _running("eagle3"), **RUNS_MODEL),
    "medusa": Kind("Medusa heads", _running("medusa"), **RUNS_MODEL),
    "lookahead": Kind(
        "n-grams that the target produces in extra rows of its batch, and those of the request's own text",
        _lookahead,
        options=("window", "ngram", "candidates"),
        check=_check_lookahead,
    ),
    "recycle": Kind("a table of the target's most likely successors of each token", _recycle, remembers=True),
    "rest": Kind(
        "a read-only corpus, --drafter-option path=SNAPSHOT, and the request's own text",
        _rest,
        has_settings=True,
        options=(SNAPSHOT_PATH,),
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
