"""Load settings from a TOML file, environment variables and flags; later sources take precedence."""

from __future__ import annotations

import difflib
import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from drafter_service.settings.quantity import parse_quantity
from drafter_service.settings.tree import ServiceConfig
from ssd.errors import UserError

PREFIX = "SSD_DRAFTER_"
"""Prefix of environment variables, such as SSD_DRAFTER_DRAFTING__CAPACITY for the key drafting.capacity. Empty ones are
ignored."""

KUBERNETES = re.compile(PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)")
"""Variables that Kubernetes sets in every pod if there is a Service called ssd-drafter."""

Tree = dict[str, Any]


def load_settings(
    file: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> ServiceConfig:
    """Return the settings; `flags` by dotted key, such as "drafting.capacity". Raises UserError that names the key."""
    layers = [
        (_read_file(file), f"{file}") if file else ({}, ""),
        (_nested(_environment_keys(environment)), f"environment variables {PREFIX}..."),
        (_nested(flags or {}), "flags"),
    ]
    merged: Tree = {}
    for layer, origin in layers:
        _check_keys(layer, ServiceConfig, origin)
        _merge(merged, layer)
    try:
        return TypeAdapter(ServiceConfig).validate_python(_with_quantities(merged, ServiceConfig))
    except ValidationError as problem:
        raise UserError("\n".join(map(_message, problem.errors()))) from None


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key. Raises UserError for another text."""
    flat = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r} is not of the form KEY=VALUE, such as limits.streams=64")
        flat[key.strip()] = _parse_value(value.strip())
    return flat


def _read_file(path: Path) -> Tree:
    try:
        return tomllib.loads(path.read_text())
    except OSError as problem:
        raise UserError(f"cannot read the settings in {path}: {problem.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as problem:
        raise UserError(f"{path} is not TOML: {problem}") from None


def _environment_keys(environment: Mapping[str, str]) -> dict[str, Any]:
    return {
        name.removeprefix(PREFIX).lower().replace("__", "."): _parse_value(value)
        for name, value in environment.items()
        if name.startswith(PREFIX) and value and not KUBERNETES.fullmatch(name)
    }


def _parse_value(text: str) -> Any:
    """Parse a TOML table; other values remain text until their type is known."""
    if not text.startswith("{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _nested(flat: Mapping[str, Any]) -> Tree:
    tree: Tree = {}
    for key, value in flat.items():
        *path, last = key.split(".")
        branch = tree
        for part in path:
            if not isinstance(branch.setdefault(part, {}), dict):
                raise UserError(f"{key}: {part} has been set to a value and cannot have keys")
            branch = branch[part]
        branch[last] = value
    return tree


def _merge(into: Tree, layer: Tree) -> None:
    for key, value in layer.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _check_keys(tree: Tree, section: type, origin: str, path: str = "") -> None:
    hints = get_type_hints(section)
    for key, value in tree.items():
        if key not in hints:
            close = difflib.get_close_matches(key, hints, 1)
            hint = f"; did you mean {path}{close[0]}?" if close else f"; known are {', '.join(hints)}"
            raise UserError(f"{origin}: there is no setting {path}{key}{hint}")
        if is_dataclass(hints[key]):
            if not isinstance(value, dict):
                raise UserError(f"{origin}: {path}{key} is a section, not a value")
            _check_keys(value, hints[key], origin, f"{path}{key}.")


def _with_quantities(tree: Tree, section: type, path: str = "") -> Tree:
    """Return the tree with texts such as "16M" converted where the setting is an integer."""
    hints = get_type_hints(section)
    read: Tree = dict(tree)
    for field in fields(section):
        value = tree.get(field.name)
        if isinstance(value, dict) and is_dataclass(hints[field.name]):
            read[field.name] = _with_quantities(value, hints[field.name], f"{path}{field.name}.")
        elif hints[field.name] is int and isinstance(value, str):
            read[field.name] = _quantity(value, f"{path}{field.name}")
        elif isinstance(value, dict):
            items = value.items()
            if get_args(hints[field.name])[-1:] == (int,):
                read[field.name] = {name: _quantity(item, f"{path}{field.name}.{name}") for name, item in items}
    return read


def _quantity(value: Any, key: str) -> Any:
    try:
        return parse_quantity(value) if isinstance(value, str) else value
    except ValueError as problem:
        raise UserError(f"{key}: {problem}") from None


def _message(error: Any) -> str:
    """Return one line for an error, starting with the key."""
    key = ".".join(map(str, error["loc"]))
    message = error["msg"].removeprefix("Value error, ")
    return f"{key}: {message}" if key else message
