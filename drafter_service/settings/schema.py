"""Settings of a program: a dataclass, loaded from several sources and printed as TOML with the meaning of each."""

from __future__ import annotations

import difflib
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar, get_args, get_type_hints

from drafter_service.settings.flags import meanings, parse_quantity, unwrapped
from ssd.errors import UserError

T = TypeVar("T")
WIDTH = 120


class Setting(NamedTuple):
    """A setting, which has a dotted key such as `drafting.capacity`."""

    kind: Any
    """Type, with the notes of `Annotated`."""
    default: Any
    """None for a factory."""
    meaning: str


class Schema(Generic[T]):
    """The settings of a dataclass; fields that are dataclasses are sections."""

    def __init__(self, model: type[T], *, without: Collection[str] = ()) -> None:
        """without: keys of fields that are no settings."""
        self._model = model
        self.sections: dict[str, type] = {"": model}
        """Dataclasses by key, "" for the whole."""
        self._without = without
        self.settings: dict[str, Setting] = dict(self._read(model))
        """By key, in the order of the fields."""

    def _read(self, section: type, path: str = "") -> Iterator[tuple[str, Setting]]:
        hints, texts = get_type_hints(section, include_extras=True), meanings(section)
        for field in fields(section):
            key, kind = f"{path}{field.name}", hints[field.name]
            if key in self._without:
                continue
            if is_dataclass(kind):
                part: Any = kind
                self.sections[key] = part
                yield from self._read(part, f"{key}.")
            else:
                default = None if field.default is MISSING else field.default
                yield key, Setting(kind, default, texts.get(field.name, ""))

    # --- Loading

    def load(self, layers: Mapping[str, Mapping[str, Any]]) -> T:
        """Return the settings in some layers, by the origins that errors name; later ones take precedence.

        Keys of a layer are dotted or nested. Raises UserError that names the key.
        """
        from pydantic import TypeAdapter, ValidationError

        merged: dict[str, Any] = {}
        origins: dict[str, str] = {}
        for origin, layer in layers.items():
            for key, value in self._flat(layer, origin):
                known = merged.get(key)
                merged[key] = {**known, **value} if isinstance(known, dict) and isinstance(value, dict) else value
                origins[key] = origin
        tree: dict[str, Any] = {}
        for key, value in merged.items():
            *path, name = key.split(".")
            branch = tree
            for part in path:
                branch = branch.setdefault(part, {})
            branch[name] = self._read_value(key, value, origins[key])
        try:
            return TypeAdapter(self._model).validate_python(tree)
        except ValidationError as problem:
            raise UserError("\n".join(_message(error, origins) for error in problem.errors())) from None

    def _flat(self, tree: Mapping[str, Any], origin: str, path: str = "") -> Iterator[tuple[str, Any]]:
        """Yield the settings of a tree. Raises UserError for unknown ones."""
        for name, value in tree.items():
            key = f"{path}{name}"
            table = next((each for each in self.settings if key.startswith(f"{each}.")), None)
            if key in self.settings:
                yield key, value
            elif table is not None:
                # An entry of a table, such as a namespace's capacity; its name may contain dots.
                yield table, {key.removeprefix(f"{table}."): value}
            elif isinstance(value, Mapping) and (value or key in self.sections):
                yield from self._flat(value, origin, f"{key}.")
            elif key in self.sections:
                raise UserError(f"{origin}: {key} is a section, not a value")
            else:
                close = difflib.get_close_matches(key, self.settings, 1)
                hint = f"did you mean {close[0]}?" if close else f"known are {', '.join(self.settings)}"
                raise UserError(f"{origin}: there is no setting {key}; {hint}")

    def _read_value(self, key: str, value: Any, origin: str) -> Any:
        """Return a value: None for "", as `to_toml` prints it, and texts such as "16M" as integers.

        The first applies to settings that are None by default, the second to integers and tables of them.
        """
        kind, _ = unwrapped(self.settings[key].kind)
        if value == "" and self.settings[key].default is None:
            return None
        if isinstance(value, dict) and unwrapped((get_args(kind) or (None,))[-1])[0] is int:
            return {name: _quantity(each, f"{origin}: {key}.{name}") for name, each in value.items()}
        return _quantity(value, f"{origin}: {key}") if kind is int else value

    # --- Printing

    def to_toml(self, config: T) -> str:
        """Return settings as a file that `load` reads, with passwords masked.

        Settings without a value are comments, such as `#folder = ""`.
        """
        from pydantic import TypeAdapter

        tree = TypeAdapter(self._model).dump_python(config, mode="json")
        return "\n\n".join(self._blocks(tree)) + "\n"

    def _blocks(self, tree: dict[str, Any]) -> Iterator[str]:
        """Yield each section's heading and settings, its tables last."""
        import tomli_w

        for section, model in self.sections.items():
            path = f"{section}." if section else ""
            values: dict[str, Any] = tree
            for part in filter(None, section.split(".")):
                values = values[part]
            if section:
                purpose = (model.__doc__ or "").partition(". ")[0].rstrip(".")
                yield f"{_comment(f'{purpose}.')}\n[{section}]"
            own = [(name, f"{path}{name}") for name in values if f"{path}{name}" in self.settings]
            for name, key in sorted(own, key=lambda each: isinstance(values[each[0]], dict)):
                value = values[name]
                if isinstance(value, dict):
                    lines = f"[{key}]\n{tomli_w.dumps(value)}".rstrip()
                elif value is None:
                    lines = f'#{name} = ""'
                else:
                    lines = tomli_w.dumps({name: _masked(value) if isinstance(value, str) else value}).rstrip()
                yield f"{_comment(self.settings[key].meaning)}\n{lines}"


def read_toml(path: Path) -> dict[str, Any]:
    """Return the contents of a TOML file. Raises UserError."""
    try:
        return tomllib.loads(path.read_text())
    except OSError as problem:
        raise UserError(f"cannot read the settings in {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not TOML: {problem}") from None


def _quantity(value: Any, where: str) -> Any:
    try:
        return parse_quantity(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise UserError(f"{where}: {problem}") from None


def _message(error: Any, origins: Mapping[str, str]) -> str:
    """Return one line for an error, with the key and, of a single setting, where it was given."""
    key = ".".join(map(str, error["loc"]))
    origin = next((f"{each}: " for known, each in origins.items() if f"{key}.".startswith(f"{known}.")), "")
    message = error["msg"].removeprefix("Value error, ")
    return f"{origin}{key}: {message}" if key else message


def _masked(text: str) -> str:
    """Mask the password before the host of a URL, which may contain "@", and that in its query."""
    return re.sub(r"(://[^/:]*:).*@", r"\1***@", re.sub(r"([?&]password=)[^&]*", r"\1***", text))


def _comment(text: str) -> str:
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False)
