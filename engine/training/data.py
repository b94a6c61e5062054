"""Text to train heads on, as the target's tokens: files, or the standard library."""

from __future__ import annotations

import json
import platform
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from engine.models.config import ModelConfig
from engine.models.folders import read_json
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError

FILES_FILE = "files.json"
"""File in the folder of the shipped target: the version of Python, and the names of files of its library."""
HELD_OUT_EVERY = 50
"""Number of documents of which one is held out."""
DOCUMENT_FIELDS = ("prompt", "text", "completion")
"""Fields of a line of a `.jsonl` file whose texts form a document; `ssd-engine generate` writes the first and last."""


@dataclass(frozen=True)
class TrainingText:
    """Tokens to train on and held-out tokens, uint32 [N] each."""

    train: np.ndarray
    held_out: np.ndarray

    def windows(self, length: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
        """Return windows of both sides in a random order, uint32 [W, length] each.

        Raises UserError for a text that has no window on one of the sides.
        """
        rng = np.random.default_rng(seed)
        sides = []
        for name, tokens in (("training", self.train), ("held-out", self.held_out)):
            count = len(tokens) // length
            if count == 0:
                raise UserError(
                    f"the {name} text has {len(tokens)} tokens, fewer than a window of {length}; give more --data"
                )
            windows = tokens[: count * length].reshape(count, length)
            sides.append(windows[rng.permutation(count)])
        return sides[0], sides[1]


def library_text(target: Path, tokenizer: Tokenizer, end: int | None) -> TrainingText:
    """Return the files of the standard library that the shipped target was trained on, and those that were held out.

    end: as for `file_text`. Raises UserError unless this Python has the same library.
    """
    files = read_json(target / FILES_FILE)
    if files["python"] != platform.python_version():
        raise UserError(
            f"{target} was trained on the standard library of Python {files['python']}, and this is Python "
            f"{platform.python_version()}; use that one, or give --data text files"
        )
    root = Path(sysconfig.get_path("stdlib"))
    sides = (
        [tokenizer.encode(text, add_special_tokens=False) for text in _documents([root / name for name in files[side]])]
        for side in ("train", "held_out")
    )
    return TrainingText(*(_joined(side, end) for side in sides))


def file_text(paths: Sequence[Path], tokenizer: Tokenizer, end: int | None) -> TrainingText:
    """Return the tokens of files. `.jsonl` files have a document per line, see `DOCUMENT_FIELDS`.

    end: the token between documents. Raises UserError for a file that cannot be read.
    """
    return _split([tokenizer.encode(document, add_special_tokens=False) for document in _documents(paths)], end)


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


def _split(documents: Sequence[np.ndarray], end: int | None) -> TrainingText:
    """Hold out every document whose number is a multiple of `HELD_OUT_EVERY`; of a single document, its end."""
    if len(documents) == 1:
        cut = len(documents[0]) * (HELD_OUT_EVERY - 1) // HELD_OUT_EVERY
        return TrainingText(*(part.astype(np.uint32) for part in (documents[0][:cut], documents[0][cut:])))
    sides: tuple[list[np.ndarray], list[np.ndarray]] = ([], [])
    for number, document in enumerate(documents):
        sides[number % HELD_OUT_EVERY == 0].append(document)
    return TrainingText(*(_joined(side, end) for side in sides))


def _joined(documents: Sequence[np.ndarray], end: int | None) -> np.ndarray:
    """Return the tokens of documents, uint32, with the token `end` around each, if there is one."""
    separator = np.array([] if end is None else [end], np.uint32)
    return np.concatenate([*(part for each in documents for part in (separator, each)), separator]).astype(np.uint32)
