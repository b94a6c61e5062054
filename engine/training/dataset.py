"""Training text as tokens, and its vocabulary: created once in a work folder and reused by resumed runs."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from engine.models.tokenizer import TOKENIZER_FILE
from engine.training.sources import Split, read_files, split, stdlib_root

END_OF_TEXT = "<|endoftext|>"

WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+"  # a word, with one character or space before it
    r"|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+"  # operators and brackets
    r"|\s*[\r\n]+"  # blank lines join the line end before them
    r"|\s+(?!\S)"  # indentation without the space that joins the word
    r"|\s+"
)
"""Pieces of text within which tokens are formed: the pattern of GPT-4's vocabulary, adapted to code."""

TOKENS_FILE = "tokens.npz"
FILES_FILE = "files.json"


@dataclass(frozen=True)
class TrainingText:
    """Tokens of a training run."""

    tokenizer: Tokenizer
    train: np.ndarray
    """uint16 [N]: every training file, each after an end-of-text token."""
    held_out: np.ndarray
    """uint16 [M]: the held-out files in the same form."""
    held_out_bytes: int
    """UTF-8 length of the held-out files, without the end-of-text tokens."""
    files: dict[str, Any]
    """`python`, `train` and `held_out`: the version and the paths on each side of the split."""


def prepare(work: Path, vocab_size: int, notify: Callable[[str], None]) -> TrainingText:
    """Read the library, split it, learn the vocabulary and encode both sides; reuse the files in `work`.

    Raises ValueError if `work` was made with another version of Python.
    """
    work.mkdir(parents=True, exist_ok=True)
    if not (work / FILES_FILE).exists():
        root = stdlib_root()
        notify(f"reading the standard library in {root}")
        sides = split(read_files(root))
        notify("learning the vocabulary")
        tokenizer = train_tokenizer((file.text for file in sides.train), vocab_size)
        tokenizer.save(str(work / TOKENIZER_FILE))
        notify("encoding")
        np.savez(
            work / TOKENS_FILE,
            train=encode_texts(tokenizer, (file.text for file in sides.train)),
            held_out=encode_texts(tokenizer, (file.text for file in sides.held_out)),
        )
        # Written last: its presence means that the other files are complete.
        (work / FILES_FILE).write_text(json.dumps(_file_list(sides), indent=1))
    text = load(work)
    if text.files["python"] != platform.python_version():
        raise ValueError(f"{work} was made with Python {text.files['python']}; use that, or another work folder")
    return text


def load(work: Path) -> TrainingText:
    """Read the files that `prepare` wrote."""
    with np.load(work / TOKENS_FILE) as arrays:
        train, held_out = arrays["train"], arrays["held_out"]
    files = json.loads((work / FILES_FILE).read_text())
    tokenizer = Tokenizer.from_file(str(work / TOKENIZER_FILE))
    return TrainingText(tokenizer, train, held_out, files["held_out_bytes"], files)


def _file_list(sides: Split) -> dict[str, object]:
    return {
        "python": platform.python_version(),
        "held_out_bytes": sum(len(file.text.encode()) for file in sides.held_out),
        "train": [file.path for file in sides.train],
        "held_out": [file.path for file in sides.held_out],
    }


def train_tokenizer(texts: Iterable[str], vocab_size: int) -> Tokenizer:
    """Learn a byte-level BPE vocabulary (Sennrich et al., 2016) with one special token, the end of a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def end_of_text(tokenizer: Tokenizer) -> int:
    """Return the id of the end-of-text token of a tokenizer from `train_tokenizer`."""
    token = tokenizer.token_to_id(END_OF_TEXT)
    assert token is not None
    return token


def encode_texts(tokenizer: Tokenizer, texts: Iterable[str]) -> np.ndarray:
    """Return all texts as one row of token ids, uint16 [N], each after an end-of-text token, and one at the end."""
    end = end_of_text(tokenizer)
    rows: list[int] = []
    for text in texts:
        rows.append(end)
        rows.extend(tokenizer.encode(text, add_special_tokens=False).ids)
    rows.append(end)
    return np.asarray(rows, dtype=np.uint16)
