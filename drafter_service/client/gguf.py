"""Read metadata and tensors of a GGUF file, the format of llama.cpp, with the library gguf.

A GGUF file takes the place of a model folder: it holds what `tokenizer_config.json` and other files hold elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from ssd.errors import UserError, missing_extra

MAGIC = b"GGUF"
ROLES = ("bos", "eos", "unk", "pad", "eot", "eom")
"""Special tokens as chat templates name them, without "_token"."""
KEYS = {"unk": "unknown", "pad": "padding"}
"""Names of roles in the metadata, where they differ."""


@dataclass(frozen=True)
class GgufFile:
    """Content of a GGUF file. The weights are mapped, not read."""

    path: Path
    metadata: Mapping[str, Any]
    """Values by keys such as "llama.block_count"."""
    tensors: Mapping[str, Any]
    """`gguf.ReaderTensor` by name. Their `data` is [rows, bytes of a row] for quantized weights."""

    def field(self, key: str) -> Any:
        """Return a value of the metadata. Raises UserError if the file does not have it."""
        if key not in self.metadata:
            raise UserError(f"{self.path} has no {key}; convert the model to GGUF again, or give its folder")
        return self.metadata[key]

    def token_id(self, role: str) -> int | None:
        """Return the id of a special token of `ROLES`; None if the model has none."""
        token = self.metadata.get(f"tokenizer.ggml.{KEYS.get(role, role)}_token_id")
        return None if token is None else int(token)

    def tokens(self) -> list[str]:
        """Return the texts of the vocabulary by token id; an empty list if the file has no vocabulary."""
        return list(self.metadata.get("tokenizer.ggml.tokens", []))


def is_gguf(path: Path) -> bool:
    """Return whether a path is a GGUF file, whatever its name."""
    try:
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def open_gguf(path: Path) -> GgufFile:
    """Return the content of a GGUF file; a file that did not change is read once.

    Raises UserError for a damaged file, for one part of several, and if the library gguf is missing.
    """
    state = path.stat()
    return _read(path, state.st_mtime_ns, state.st_size)


@lru_cache(maxsize=4)
def _read(path: Path, _modified_ns: int, size: int) -> GgufFile:
    try:
        from gguf import GGUFReader
    except ImportError:
        raise missing_extra(f"{path} is a GGUF file, which needs the library gguf", "gguf") from None
    try:
        reader = GGUFReader(path)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except Exception:  # The library passes on exceptions of numpy, which do not say what is wrong with the file.
        raise UserError(
            f"{path} is damaged or cut short, or of a version of GGUF that the library gguf does not read: its "
            f"{size:,} bytes are not what its header describes; compare the size with the original's, and download or "
            "copy it again"
        ) from None
    if int(metadata.get("split.count", 1)) > 1:
        raise UserError(f"{path} is one of {metadata['split.count']} parts; join them with llama-gguf-split --merge")
    return GgufFile(path, metadata, {tensor.name: tensor for tensor in reader.tensors})


def gguf_tokenizer_config(path: Path) -> dict[str, Any]:
    """Return the fields that `tokenizer_config.json` has: special tokens and chat templates. Raises UserError."""
    file = open_gguf(path)
    tokens = file.tokens()
    ids = {role: file.token_id(role) for role in ROLES}
    config: dict[str, Any] = {
        f"{role}_token": tokens[token] for role, token in ids.items() if token is not None and token < len(tokens)
    }
    prefix = "tokenizer.chat_template"
    config["chat_template"] = [
        {"name": key.removeprefix(prefix).removeprefix(".") or "default", "template": template}
        for key, template in file.metadata.items()
        if key == prefix or key.startswith(f"{prefix}.")
    ]
    return config
