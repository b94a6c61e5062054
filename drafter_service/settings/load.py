"""Load the service's settings from a TOML file, environment variables and flags; later sources take precedence."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from drafter_service.settings.schema import read_toml
from drafter_service.settings.tree import SETTINGS, ServiceConfig
from ssd.errors import UserError

PREFIX = "SSD_DRAFTER_"
"""Prefix of environment variables, such as SSD_DRAFTER_DRAFTING__CAPACITY for the key drafting.capacity. Empty ones are
ignored."""

KUBERNETES = re.compile(PREFIX + r"(SERVICE_HOST|SERVICE_PORT(_.*)?|PORT(_\d+_(TCP|UDP).*)?)")
"""Variables that Kubernetes sets in every pod if there is a Service called ssd-drafter."""


def load_settings(
    file: Path | None = None, flags: Mapping[str, Any] | None = None, environment: Mapping[str, str] = os.environ
) -> ServiceConfig:
    """Return the settings; `flags` by dotted key, such as "drafting.capacity". Raises UserError that names the key."""
    variables = {
        name.removeprefix(PREFIX).lower().replace("__", "."): _parse_value(value)
        for name, value in environment.items()
        if name.startswith(PREFIX) and value and not KUBERNETES.fullmatch(name)
    }
    layers = {} if file is None else {str(file): read_toml(file)}
    return SETTINGS.load({**layers, f"environment variables {PREFIX}...": variables, "flags": flags or {}})


def read_assignments(assignments: Sequence[str]) -> dict[str, Any]:
    """Return the values of KEY=VALUE texts by key. Raises UserError for another text."""
    flat = {}
    for text in assignments:
        key, equals, value = text.partition("=")
        if not equals or not key:
            raise UserError(f"{text!r} is not of the form KEY=VALUE, such as limits.streams=64")
        flat[key.strip()] = _parse_value(value.strip())
    return flat


def _parse_value(text: str) -> Any:
    """Parse a TOML table; other values remain text until their type is known."""
    if not text.startswith("{"):
        return text
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
