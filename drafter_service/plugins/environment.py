"""Settings of plug-ins from environment variables, for hosts whose own options cannot carry them."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from drafter_service.auth.connector import ClientAccess
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.namespaces import DEFAULT_ADDRESS, DrafterSettings
from drafter_service.settings.quantity import LARGEST, parse_quantity
from ssd.errors import UserError

ADDRESS = "SSD_ADDRESS"
NAMESPACE = "SSD_NAMESPACE"
DEADLINE = "SSD_DEADLINE_MS"
CAPACITY = "SSD_CAPACITY"
ACCESS = {"ca": "SSD_CA", "certificate": "SSD_CERTIFICATE", "key": "SSD_KEY", "token": "SSD_TOKEN_FILE"}
"""Variable of each file of `ClientAccess`."""
SERVER_NAME = "SSD_SERVER_NAME"

DEADLINE_S = 0.01
"""Default of the maximum wait for drafts in seconds: a fraction of a step."""


def settings_from_environment(model: ModelIdentity, environment: Mapping[str, str] = os.environ) -> DrafterSettings:
    """Return where drafts come from. Empty variables count as unset. Raises UserError for a value that is not valid."""
    given = {name: value for name, value in environment.items() if value}
    files: dict[str, Any] = {field: Path(given[name]) for field, name in ACCESS.items() if name in given}
    try:
        access = ClientAccess(**files, server_name=given.get(SERVER_NAME))
    except ValueError as problem:
        raise UserError(f"{', '.join(ACCESS.values())}: {problem}") from None
    deadline_ms = _positive(given, DEADLINE, float, DEADLINE_S * 1e3)
    return DrafterSettings(
        ssd=given.get(ADDRESS, DEFAULT_ADDRESS),
        namespace=given.get(NAMESPACE, ""),
        model=model,
        deadline_s=deadline_ms / 1e3,
        access=access,
        capacity=int(_positive(given, CAPACITY, parse_quantity, DrafterSettings.capacity)),
    )


def _positive(given: Mapping[str, str], name: str, parse: Callable[[str], float], default: float) -> float:
    """Return the number in a variable. Raises UserError if it is not above 0."""
    if name not in given:
        return default
    try:
        value = parse(given[name])
    except ValueError:
        value = 0
    if not 0 < value < LARGEST:  # Also false for NaN.
        raise UserError(f"{name} must be a number above 0, not {given[name]!r}")
    return value
