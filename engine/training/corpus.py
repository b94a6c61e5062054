"""Tokens to train on, made once in a work folder and read again by every resumed run."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from engine.models.tokenizer import TOKENIZER_FILE
from engine.training.sources import SourceFile, Split, read_files, split, stdlib_root
from engine.training.vocabulary import encode_texts, train_tokenizer

TOKENS_FILE = "tokens.npz"
FILES_FILE = "files.json"


@dataclass(frozen=True)
class TrainingText:
    """What a training run reads."""

    tokenizer: Tokenizer
    train: np.ndarray
    """uint16 [N]: every training file, each led by the end-of-text token."""
    held_out: np.ndarray
    """uint16 [M]: the held-out files likewise."""
    held_out_bytes: int
    """UTF-8 length of the held-out files, without the end-of-text tokens."""
    files: dict[str, Any]
    """`python`, `train` and `held_out`: the version and the paths on each side of the split."""


def prepare(work: Path, vocab_size: int, say: Callable[[str], None]) -> TrainingText:
    """Read the library, split it, learn the vocabulary and encode both sides; reuse what `work` already holds."""
    work.mkdir(parents=True, exist_ok=True)
    if not (work / FILES_FILE).exists():
        root = stdlib_root()
        say(f"reading the standard library in {root}")
        sides = split(read_files(root))
        say("learning the vocabulary")
        tokenizer = train_tokenizer((file.text for file in sides.train), vocab_size)
        tokenizer.save(str(work / TOKENIZER_FILE))
        say("encoding")
        np.savez(
            work / TOKENS_FILE,
            train=encode_texts(tokenizer, (file.text for file in sides.train)),
            held_out=encode_texts(tokenizer, (file.text for file in sides.held_out)),
        )
        # Last, so that its presence says that the others are whole.
        (work / FILES_FILE).write_text(json.dumps(_file_list(sides), indent=1))
    text = load(work)
    if text.files["python"] != platform.python_version():
        raise ValueError(f"{work} was made with Python {text.files['python']}; use that, or another work folder")
    return text


def load(work: Path) -> TrainingText:
    """Read what `prepare` wrote."""
    with np.load(work / TOKENS_FILE) as arrays:
        train, held_out = arrays["train"], arrays["held_out"]
    files = json.loads((work / FILES_FILE).read_text())
    tokenizer = Tokenizer.from_file(str(work / TOKENIZER_FILE))
    return TrainingText(tokenizer, train, held_out, files["held_out_bytes"], files)


def held_out_files(files: Sequence[SourceFile], listed: Sequence[str]) -> list[SourceFile]:
    """Those of `files` whose paths are `listed`, in the listed order."""
    by_path = {file.path: file for file in files}
    return [by_path[path] for path in listed]


def _file_list(sides: Split) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "held_out_bytes": sum(len(file.text.encode()) for file in sides.held_out),
        "train": [file.path for file in sides.train],
        "held_out": [file.path for file in sides.held_out],
    }
