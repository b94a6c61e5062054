"""Text to train heads on, as the target's tokens: files, or the standard library."""

from __future__ import annotations

import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from engine.models.config import ModelConfig
from engine.models.folders import read_json
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError

FILES_FILE = "files.json"
"""File in the folder of the shipped target: the version of Python, and the names of files of its library."""
DOCUMENT_FIELDS = ("prompt", "text", "completion")
"""Fields of a line of a `.jsonl` file whose texts form a document; `ssd-engine generate` writes the first and last."""


def windows_of(tokens: np.ndarray, length: int, seed: int) -> np.ndarray:
    """Return windows of a text, uint32 [N], in a random order, uint32 [W, length].

    Raises UserError for a text that has no window.
    """
    count = len(tokens) // length
    if count == 0:
        raise UserError(f"the text has {len(tokens)} tokens, fewer than a window of {length}; give more --data")
    windows = tokens[: count * length].reshape(count, length)
    return windows[np.random.default_rng(seed).permutation(count)]


def library_tokens(target: Path, tokenizer: Tokenizer, end: int | None) -> np.ndarray:
    """Return the files of the standard library that the shipped target was trained on, without those of its prompts.

    end: as for `file_tokens`. Raises UserError unless this Python has the same library.
    """
    files = read_json(target / FILES_FILE)
    if files["python"] != platform.python_version():
        raise UserError(
            f"{target} was trained on the standard library of Python {files['python']}, and this is Python "
            f"{platform.python_version()}; use that one, or give --data text files"
        )
    root = Path(sysconfig.get_path("stdlib"))
    return file_tokens([root / name for name in files["train"]], tokenizer, end)


def file_tokens(paths: Sequence[Path], tokenizer: Tokenizer, end: int | None) -> np.ndarray:
    """Return the tokens of files, uint32 [N]. `.jsonl` files have a document per line, see `DOCUMENT_FIELDS`.

    end: the token around documents, if the model has one. Raises UserError for a file that cannot be read.
    """
    separator = np.array([] if end is None else [end], np.uint32)
    documents = [tokenizer.encode(document, add_special_tokens=False) for document in _documents(paths)]
    parts = [part for each in documents for part in (separator, each)]
    return np.concatenate([*parts, separator]).astype(np.uint32)


def end_token(config: ModelConfig) -> int | None:
    """Return the token that separates documents, if the model has one."""
    return config.eos_token_ids[0] if config.eos_token_ids else config.bos_token_id


def _documents(paths: Sequence[Path]) -> Iterator[str]:
    for path in paths:
        try:
            text = path.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as problem:
            reason = getattr(problem, "strerror", None) or problem
            raise UserError(f"cannot read {path}: {reason}; give text in UTF-8") from None
        if path.suffix != ".jsonl":
            yield text
            continue
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield _document(path, number, line)


def _document(path: Path, number: int, line: str) -> str:
    try:
        fields = json.loads(line)
        parts = [fields[name] for name in DOCUMENT_FIELDS if name in fields]
    except (ValueError, TypeError):
        parts = []
    if not parts or not all(isinstance(part, str) for part in parts):
        raise UserError(
            f"{path}, line {number}: give a JSON object with strings, one or several of {', '.join(DOCUMENT_FIELDS)}"
        )
    return "".join(parts)
