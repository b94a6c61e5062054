"""What an engine says it serves, from the folders that it loads."""

from __future__ import annotations

import json
from pathlib import Path

from drafter_service.observability.facts import ModelIdentity
from drafter_service.server.identity import fingerprint
from ssd.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"


def model_identity(folder: Path, *, adapter: Path | None = None, name: str = "") -> ModelIdentity:
    """The identity of the model in a Hugging Face folder, with a LoRA adapter's folder if there is one.

    name: what it is called, by default as its folder is, or as the hub calls what lies in its cache.

    Raises UserError if a file that is needed cannot be read.
    """
    return ModelIdentity(
        name=name or _name(folder.resolve()),
        tokenizer=fingerprint(folder),
        adapter="" if adapter is None else fingerprint(adapter / ADAPTER_FILE),
        vocabulary_size=_vocabulary_size(folder / "config.json"),
    )


def _name(folder: Path) -> str:
    """In the hub's cache a folder is called after a revision, and lies in models--owner--name/snapshots."""
    snapshots = folder.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _vocabulary_size(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not say the model's vocab_size; download or copy it again") from None
