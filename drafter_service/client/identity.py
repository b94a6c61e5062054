"""What an engine says it serves, from the folders that it loads."""

from __future__ import annotations

import json
from pathlib import Path

from drafter_service.facts import ModelIdentity
from drafter_service.identity import fingerprint
from ssd.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"


def model_identity(folder: Path, *, adapter: Path | None = None, name: str = "") -> ModelIdentity:
    """The identity of the model in a Hugging Face folder, with a LoRA adapter's folder if there is one.

    name: what it is called, by default as its folder is. Raises UserError if a file that is needed cannot be read.
    """
    return ModelIdentity(
        name=name or folder.resolve().name,
        tokenizer=fingerprint(folder),
        adapter="" if adapter is None else fingerprint(adapter / ADAPTER_FILE),
        vocabulary_size=_vocabulary_size(folder / "config.json"),
    )


def _vocabulary_size(path: Path) -> int:
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not say the model's vocab_size; download or copy it again") from None
