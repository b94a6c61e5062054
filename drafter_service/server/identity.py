"""What a client serves, and the namespace that follows from it."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from drafter_service.observability.facts import ModelIdentity
from ssd.errors import UserError

MOST_READABLE = 64


def default_namespace(model: ModelIdentity) -> str:
    """A namespace's name made of the model, its tokenizer and its adapter: readable, and different if one of them is.

    Without anything known about the model it is "default".
    """
    if not (model.name or model.tokenizer or model.adapter):
        return "default"
    digest = hashlib.sha256("\0".join((model.name, model.tokenizer, model.adapter)).encode()).hexdigest()[:12]
    readable = re.sub(r"[^A-Za-z0-9._-]+", "-", model.name.rstrip("/").rpartition("/")[2])[:MOST_READABLE].strip(".-")
    return f"{readable or 'model'}-{digest}"


def fingerprint(tokenizer: Path) -> str:
    """The SHA-256 of a tokenizer.json, or of the one in a folder, in hex. Raises UserError if it cannot be read."""
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError as problem:
        raise UserError(f"cannot read the tokenizer {path}: {problem.strerror}") from None
