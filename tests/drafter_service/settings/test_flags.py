"""Options of a command that are made from the fields of a dataclass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

import click
import pytest
from annotated_types import Interval
from click.testing import CliRunner

from drafter_service.settings.flags import File, Flag, FlagCommand, Number, takes


def pairs(_context, _option, given):
    return dict(text.split("=") for text in given)


def numbers(_context, _option, text):
    return tuple(map(int, text.split(",")))


@dataclass(frozen=True)
class Base:
    source: Annotated[tuple[str, ...], Flag("--from", "WHERE")]
    """Where from."""
    size: Number | None = None
    """How much.  [default: all]"""


@dataclass(frozen=True)
class Options(Base):
    shape: Literal["path", "tree"] = "path"
    """Which shape."""
    least: Annotated[Annotated[int, Interval(ge=1, le=9)] | None, Flag(metavar="N", note=" Really.")] = None
    """How many."""
    share: Annotated[float, Interval(gt=0)] = 0.5
    """How large."""
    is_quiet: bool = False
    """Be quiet."""
    file: File | None = None
    """A file."""
    depths: Annotated[Sequence[int], Flag("--depth", read=numbers)] = (4, 8)
    """Depths."""
    pairs: Annotated[Mapping[str, str], Flag("--pair", "KEY=VALUE", pairs)] = field(default_factory=dict)
    """Pairs."""
    hidden: int = field(default=3, init=False)


def run(*arguments):
    """Return the result of a command with these options, and what it got."""
    got = []

    @click.command(cls=FlagCommand)
    @click.argument("name")
    @takes(Options)
    def command(name, options):
        got.append((name, options))

    return CliRunner().invoke(command, ["name", *arguments], terminal_width=200), got


def test_values_have_the_types_of_the_fields():
    assert run("--from", "a")[1] == [("name", Options(("a",)))]
    given = "--from a --from b --size 16M --shape tree --least 3 --share 1 --is-quiet --file f --depth 1 --pair k=v"
    expected = Options(("a", "b"), 16_000_000, "tree", 3, 1.0, True, Path("f"), (1,), {"k": "v"})
    assert run(*given.split())[1] == [("name", expected)]


@pytest.mark.parametrize(
    ("given", "option", "words"),
    [
        ("", "--from", "Missing option"),
        ("--from a --size many", "--size", "is not a number"),
        ("--from a --shape star", "--shape", "is not one of"),
        ("--from a --least 10", "--least", "1<=x<=9"),
        ("--from a --share 0", "--share", "x>0"),
        ("--from a --file /", "--file", "is a directory"),
        ("--from a --hidden 1", "--hidden", "No such option"),
    ],
)
def test_wrong_values_are_refused_by_the_name_of_the_option(given, option, words):
    error = run(*given.split())[0].stderr
    assert option in error
    assert words in error


def test_the_help_consists_of_the_docstrings():
    lines = [" ".join(line.split()) for line in run("--help")[0].stdout.splitlines()]
    for line in (
        "--from WHERE Where from. [required]",
        "--size NUMBER How much. [default: all]",
        "--shape [path|tree] Which shape.",
        "--least N How many. Really. [1<=x<=9]",
        "--is-quiet Be quiet.",
        "--file FILE A file.",
        "--depth TEXT Depths.",
        "--pair KEY=VALUE Pairs.",
    ):
        assert line in lines
