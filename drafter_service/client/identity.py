"""Identity of the served model, from the folders that the engine loads, and name of the engine."""

from __future__ import annotations

import hashlib
import json
import os
import re
import socket
from collections.abc import Iterable
from pathlib import Path

from drafter_service.client.gguf import is_gguf, open_gguf
from drafter_service.observability.facts import ModelIdentity
from ssd.errors import UserError

ADAPTER_FILE = "adapter_model.safetensors"
MAX_HOST_NAME = 100
"""Number of characters of the machine's name that `process_name` keeps."""


def process_name() -> str:
    """Return a name of this process, the default name of its engine: machine and process id, such as "node-3:4711"."""
    machine = re.sub(r"[^A-Za-z0-9_.-]+", "-", socket.gethostname())[:MAX_HOST_NAME]
    return f"{machine}:{os.getpid()}"


def model_identity(folder: Path, *, adapter: Path | None = None) -> ModelIdentity:
    """Return the identity of the model in a Hugging Face folder or GGUF file, with a LoRA adapter's folder if any.

    Its name is that of the folder, or of the hub's repository for a folder in the hub's cache, or of the GGUF file. A
    GGUF file has the same identity here and in llama.cpp. Raises UserError if a file that is needed cannot be read.
    """
    is_file = is_gguf(folder)
    return ModelIdentity(
        name=folder.stem if is_file else _name(folder.resolve()),
        tokenizer=fingerprint(folder),
        adapter="" if adapter is None else fingerprint(adapter / ADAPTER_FILE),
        vocab_size=len(open_gguf(folder).tokens()) if is_file else _vocab_size(folder / "config.json"),
    )


def fingerprint(path: Path) -> str:
    """Return the SHA-256 of a file, in hex; for a folder that of its tokenizer.json, for a GGUF file of its vocabulary.

    Raises UserError.
    """
    if is_gguf(path):
        return vocabulary_fingerprint(text.encode() for text in open_gguf(path).tokens())
    file = path / "tokenizer.json" if path.is_dir() else path
    try:
        with file.open("rb") as content:
            return hashlib.file_digest(content, "sha256").hexdigest()
    except OSError as problem:
        raise UserError(f"cannot read {file}: {problem.strerror}") from None


def vocabulary_fingerprint(tokens: Iterable[bytes]) -> str:
    """Return the SHA-256, in hex, of the texts of a vocabulary by token id; "" without tokens."""
    content = b"".join(b"%d:%b" % (len(token), token) for token in tokens)
    return hashlib.sha256(content).hexdigest() if content else ""


def _name(folder: Path) -> str:
    """Return the name of a model folder; the hub's cache names folders models--OWNER--NAME/snapshots/REVISION."""
    snapshots = folder.parent
    if snapshots.name == "snapshots" and snapshots.parent.name.startswith("models--"):
        return snapshots.parent.name.removeprefix("models--").replace("--", "/")
    return folder.name


def _vocab_size(path: Path) -> int:
    try:
        config = json.loads(path.read_text())
        # Multimodal models have a section for the text model.
        return int((config if "vocab_size" in config else config["text_config"])["vocab_size"])
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{path} does not contain the model's vocab_size; download or copy it again") from None
