"""The rows of a comparison: drafters with their draft depth, draft shape and options."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from engine.drafters.registry import DEPTH, KINDS, MAKE_SNAPSHOT, SNAPSHOT_PATH, check_kind, configure, parse_kinds
from ssd.config import MAX_DRAFT, DrafterConfig, DraftShape
from ssd.errors import UserError

ALL = "all"
NOT_IN_ALL = ("none", "ssd-remote")
"""Kinds that `all` leaves out: the baseline itself, and the same drafter as `ssd` behind a socket."""
PATH_KINDS = ("ngram", "classic", "draft-model", "self-int8", "mtp", "eagle", "eagle3")
"""Kinds that draft paths unless a shape is given; `ngram` and `classic` always do. A network's figure at depth K then
belongs to K draft tokens. Each further node of its trees takes a row in a forward pass of its own; other kinds get the
nodes of a tree nearly for free."""
SHAPE = "shape"
"""Option of a row that is not the drafter's."""


@dataclass(frozen=True)
class Row:
    """A drafter with its settings."""

    name: str
    """The `--drafter` name, followed by its options as `@NAME=VALUE`, without the depth."""
    drafter: str
    options: Mapping[str, str]
    """Options of the drafter."""
    depth: int
    """The requested draft depth, K."""
    has_depth: bool
    """Whether the drafter can limit its depth. Others draft as deep as the engine verifies."""
    shape: DraftShape

    @property
    def kinds(self) -> list[str]:
        """The combined kinds."""
        return parse_kinds(self.drafter)

    @property
    def samples_q(self) -> bool:
        """Whether its drafts may be sampled from q. All others are drafted and verified alike in both modes."""
        [kind, *others] = self.kinds
        return not others and (kind not in KINDS or (KINDS[kind].runs_model and self.shape == "path"))

    @property
    def remembers(self) -> bool:
        """Whether earlier requests improve its drafts, as far as is known."""
        return any(kind not in KINDS or KINDS[kind].remembers for kind in self.kinds)


def parse_rows(text: str, depths: Sequence[int], shape: DraftShape | Literal["auto"]) -> list[Row]:
    """Return the rows that a list of `all` and `DRAFTER[@NAME=VALUE...]` stands for, each once.

    depths: of drafters that can limit it. shape: of rows without their own. Raises UserError for an unknown drafter or
    option.
    """
    rows: dict[tuple[str, int], Row] = {}
    for part in _expanded(text.split(",")):
        drafter, *pairs = part.split("@")
        options = dict(_pair(part, pair) for pair in pairs)
        has_depth = any(kind in KINDS and DEPTH in KINDS[kind].option_names for kind in parse_kinds(drafter))
        of_row = [_number(DEPTH, options.pop(DEPTH))] if DEPTH in options else depths
        for depth in of_row if has_depth else of_row[:1]:
            row = _row(drafter, dict(options), depth, has_depth, shape)
            rows.setdefault((row.name, depth), row)
    if not rows:
        raise UserError(f"--drafter {text}: give at least one drafter to compare with none")
    return list(rows.values())


def unusable(row: Row, draft_models: Mapping[str, Path], target: Path) -> str | None:
    """Return why a row cannot run, None if it can: one of its kinds has no weights for this target, or no corpus.

    draft_models: folders of weights by kind. Raises UserError if such a folder, the row's corpus or one of its options
    cannot be used.
    """
    config = configure(row.drafter, DrafterConfig(), row.options)
    for kind in row.kinds:
        if kind in KINDS and SNAPSHOT_PATH in KINDS[kind].option_names and SNAPSHOT_PATH not in row.options:
            return f"no corpus: give {row.name}@{SNAPSHOT_PATH}=SNAPSHOT, which `{MAKE_SNAPSHOT}` makes"
        try:
            check_kind(kind, config, draft_models.get(kind), target)
        except UserError as problem:
            if kind in draft_models or not KINDS[kind].runs_model:
                raise
            return f"no weights: {problem}"
    return None


def _expanded(parts: Iterable[str]) -> Iterator[str]:
    for part in parts:
        if part == ALL:
            yield from (kind for kind in KINDS if kind not in NOT_IN_ALL)
        elif part != "none":
            yield part


def _row(
    drafter: str, options: dict[str, str], depth: int, has_depth: bool, shape: DraftShape | Literal["auto"]
) -> Row:
    name = "".join([drafter, *(f"@{key}={value}" for key, value in options.items())])
    given = options.pop(SHAPE, shape)
    if given == "auto":
        given = "path" if drafter in PATH_KINDS else "tree"
    shapes: dict[str, DraftShape] = {each: each for each in get_args(DraftShape)}
    if given not in shapes:
        raise UserError(f"--drafter {name}: {SHAPE} must be {' or '.join(shapes)}, not {given!r}")
    configure(drafter, DrafterConfig(), options)
    if has_depth:
        options[DEPTH] = str(depth)
    return Row(name, drafter, options, depth, has_depth, shapes[given])


def _pair(part: str, text: str) -> tuple[str, str]:
    key, separator, value = text.partition("=")
    if not key or not separator:
        raise UserError(f"--drafter {part}: an option must be @NAME=VALUE, not @{text}")
    return key, value


def _number(name: str, text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= MAX_DRAFT:
        raise UserError(f"{name} must be a whole number from 1 to {MAX_DRAFT}, not {text!r}")
    return int(text)
