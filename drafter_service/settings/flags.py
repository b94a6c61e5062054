"""Command-line options from dataclasses: a field is an option, and its docstring the option's help.

Integers may have suffixes: 16M tokens, 4G of memory.
"""

from __future__ import annotations

import ast
import functools
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, Field, dataclass, fields
from decimal import Decimal
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import click
from annotated_types import Interval

LARGEST = 1 << 63
SUFFIXES = {"k": 1_000, "m": 1_000_000, "g": 1_000_000_000}
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}(,|$))")
"""Commas of an integer such as 16,000,000. Others, as in 1,5M and 1,500M, may be decimal points."""


def parse_quantity(text: str) -> int:
    """Parse an integer such as 500k, 16M, 4G, 16_000_000 or 16,000,000. Raises ValueError."""
    lowered = THOUSANDS.sub("", text.strip().lower().replace("_", ""))
    scale = SUFFIXES.get(lowered[-1:], 1)
    try:
        amount = Decimal(lowered.removesuffix(lowered[-1:] if scale > 1 else "")) * scale
        if amount % 1 == 0 and abs(amount) < LARGEST:
            return int(amount)
    except ArithmeticError:
        pass
    raise ValueError(f"{text!r} is not a number such as 16000000, 500k or 16M")


class Quantity(click.ParamType):  # type: ignore[type-arg]  # older versions of click have no argument
    """Option type for integers such as 500k or 16M."""

    name = "number"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Convert an option's text."""
        try:
            return parse_quantity(str(value))
        except ValueError as problem:
            self.fail(str(problem), param, ctx)


@dataclass(frozen=True)
class Flag:
    """Option of a field, in `Annotated`, where the field's name and type do not say enough."""

    name: str = ""
    """Name of the option; empty: that of the field, with dashes."""
    metavar: str | None = None
    """Word for its value in the help."""
    read: Callable[[click.Context, click.Parameter, Any], Any] | None = None
    """Callback that converts the text, or the texts of an option that can be repeated."""
    kind: Any = None
    """Type of click."""
    note: str = ""
    """Text after the docstring in the help."""


F = TypeVar("F", bound=Callable[..., Any])
File = Annotated[Path, Flag(kind=click.Path(dir_okay=False, path_type=Path))]
Folder = Annotated[Path, Flag(kind=click.Path(file_okay=False, path_type=Path))]
Number = Annotated[int, Flag(kind=Quantity())]
Options = Callable[[], list[click.Option]]


class FlagCommand(click.Command):
    """A command whose options are made when it is called or explained, not when the list of commands is."""

    def get_params(self, ctx: click.Context) -> list[click.Parameter]:
        """Return all options and arguments."""
        waiting: list[Options] = vars(self.callback).pop("flags", [])
        self.params += [option for make in waiting for option in make()]
        return super().get_params(ctx)


def with_flags(make: Options) -> Callable[[F], F]:
    """Return a decorator that adds options to a function which becomes a `FlagCommand`."""

    def add(command: F) -> F:
        vars(command)["flags"] = [make, *vars(command).get("flags", [])]
        return command

    return add


def takes(model: type, name: str = "options") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the options of a dataclass to a function, which gets them as argument `name`.

    The function becomes a `FlagCommand`.
    """
    own = [each for each in fields(model) if each.init]

    def make() -> list[click.Option]:
        hints, texts = get_type_hints(model, include_extras=True), meanings(model)
        return [option(each.name, hints[each.name], texts[each.name], _default(each)) for each in own]

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(command)
        def with_options(*args: Any, **given: Any) -> Any:
            values = {each.name: given.pop(each.name) for each in own}
            return command(*args, **{name: model(**values)}, **given)

        return with_flags(make)(with_options)

    return add


def option(name: str, hint: Any, text: str, default: Any = None) -> click.Option:
    """Return the option of a field with this type; text: its help.

    A Boolean is a flag, a literal a choice, and a tuple or mapping can be given several times. default: MISSING for an
    option that must be given.
    """
    kind, notes = unwrapped(hint)
    flag = functools.reduce(_joined, (note for note in notes if isinstance(note, Flag)), Flag())
    more: dict[str, Any] = {"help": text + flag.note, "metavar": flag.metavar, "callback": flag.read}
    more |= {"required": True} if default is MISSING else {"default": default}
    if kind is bool:
        more["is_flag"] = True
    else:
        more["multiple"] = get_origin(kind) in (tuple, Mapping)
        more["type"] = flag.kind or _click_type(kind, notes)
    return click.Option([flag.name or f"--{name.replace('_', '-')}", name], **more)


def _joined(first: Flag, second: Flag) -> Flag:
    return Flag(*(own or other for own, other in zip(vars(first).values(), vars(second).values(), strict=True)))


def _default(field: Field[Any]) -> Any:
    """Return the default of an option; None, which the help does not show, for nothing, and text for a list."""
    value = field.default if field.default_factory is MISSING else field.default_factory()
    if value in ((), {}):
        return None
    return ",".join(map(str, value)) if isinstance(value, tuple) else value


def unwrapped(hint: Any) -> tuple[Any, list[object]]:
    """Return a type without None, and what `Annotated` says of it."""
    if get_origin(hint) in (Union, UnionType):
        [hint] = [each for each in get_args(hint) if each is not type(None)]
    if get_origin(hint) is not Annotated:
        return hint, []
    kind, notes = unwrapped(get_args(hint)[0])
    return kind, [*hint.__metadata__, *notes]


def _click_type(kind: Any, notes: list[object]) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    if (get_origin(kind) is tuple and Path in get_args(kind)) or kind is Path:
        return click.Path(path_type=Path)
    if not isinstance(kind, type):
        return str
    ranges: Any = click.IntRange if kind is int else click.FloatRange
    for note in notes:
        if isinstance(note, Interval):
            return ranges(note.gt if note.ge is None else note.ge, note.le, min_open=note.ge is None)
    return kind


def meanings(model: type) -> dict[str, str]:
    """Return the docstrings of the fields of a dataclass and its bases, in one line each."""
    found: dict[str, str] = {}
    for each in reversed([each for each in model.__mro__ if each is not object]):
        found |= _of_module(each.__module__).get(each.__name__, {})
    return found


@functools.cache
def _of_module(name: str) -> dict[str, dict[str, str]]:
    """Return the docstrings of fields in a module, by class and field."""
    tree = ast.parse(Path(str(sys.modules[name].__file__)).read_text(encoding="utf-8"))
    return {
        each.name: {
            node.target.id: " ".join(ast.literal_eval(text.value).split())
            for node, text in zip(each.body, each.body[1:], strict=False)
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name) and isinstance(text, ast.Expr)
        }
        for each in tree.body
        if isinstance(each, ast.ClassDef)
    }
