"""Text that the shipped target is trained on: the Python files of a CPython standard library.

Chooses the files, finds near-duplicates among them, and splits them into training and held-out text
so that near-duplicates stay on one side. Independent of tokens.
"""

from __future__ import annotations

import random
import re
import sysconfig
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

EXCLUDED = (
    r"site-packages/",  # not the standard library
    r"__pycache__/",
    r"config-",  # depend on the build
    r"_sysconfigdata",
    r"encodings/",  # tables, nearly all of them generated
    r"pydoc_data/",  # one generated string
    r"lib2to3/tests/data/",  # deliberately odd syntax
    r"test/bad",  # deliberately broken files
)

HELD_OUT_SHARE = 0.05
"""Share of the text that is never trained on."""

MAX_HELD_OUT_GROUP_SHARE = 0.01
"""Larger near-duplicate groups are always trained on: a single one would fill the held-out text."""

DUPLICATE_SHARE = 0.25
"""Two files are near-duplicates if this share of the shorter one's distinctive lines is in the other."""

DISTINCTIVE_LINE_CHARS = 24
"""Shorter lines occur in unrelated files."""

COMMON_LINE_FILES = 25
"""A line in more files than this is an idiom, not a copy."""


@dataclass(frozen=True)
class SourceFile:
    """One file of the standard library."""

    path: str
    """Relative to the library's root, with forward slashes."""
    text: str


@dataclass(frozen=True)
class Split:
    """Training and held-out files; near-duplicates are on the same side."""

    train: tuple[SourceFile, ...]
    held_out: tuple[SourceFile, ...]


def stdlib_root() -> Path:
    """Return the folder of this interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def read_files(root: Path) -> list[SourceFile]:
    """Return the Python files below `root` to train on, sorted by path. Files that are not UTF-8 are left out."""
    excluded = re.compile("|".join(f"(^|/){pattern}" for pattern in EXCLUDED))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root).as_posix()
        if excluded.search(relative):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except (UnicodeDecodeError, OSError):
            continue
        if text.strip():
            files.append(SourceFile(relative, text))
    return files


def near_duplicate_groups(files: Sequence[SourceFile]) -> list[list[int]]:
    """Return groups of indices of `files` that share much of their text, directly or through other files."""
    distinctive = [
        {line for raw in file.text.splitlines() if len(line := raw.strip()) >= DISTINCTIVE_LINE_CHARS} for file in files
    ]
    owners: dict[str, list[int]] = defaultdict(list)
    for index, lines in enumerate(distinctive):
        for line in lines:
            owners[line].append(index)
    shared: dict[tuple[int, int], int] = defaultdict(int)
    for members in owners.values():
        if 1 < len(members) <= COMMON_LINE_FILES:
            for pair in combinations(members, 2):
                shared[pair] += 1

    parent = list(range(len(files)))

    def root(index: int) -> int:
        while parent[index] != index:
            parent[index] = parent[parent[index]]
            index = parent[index]
        return index

    for (left, right), count in shared.items():
        if count >= DUPLICATE_SHARE * min(len(distinctive[left]), len(distinctive[right])):
            parent[root(left)] = root(right)
    groups: dict[int, list[int]] = defaultdict(list)
    for index in range(len(files)):
        groups[root(index)].append(index)
    return list(groups.values())


def split(files: Sequence[SourceFile], seed: int = 0) -> Split:
    """Hold out `HELD_OUT_SHARE` of the text, in whole near-duplicate groups chosen at random."""
    groups = near_duplicate_groups(files)
    random.Random(seed).shuffle(groups)
    total = sum(len(file.text) for file in files)
    held_out: set[int] = set()
    held_out_chars = 0
    for group in groups:
        chars = sum(len(files[index].text) for index in group)
        if chars <= MAX_HELD_OUT_GROUP_SHARE * total and held_out_chars < HELD_OUT_SHARE * total:
            held_out.update(group)
            held_out_chars += chars
    return Split(
        train=tuple(file for index, file in enumerate(files) if index not in held_out),
        held_out=tuple(file for index, file in enumerate(files) if index in held_out),
    )
