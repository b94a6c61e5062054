"""Find and load the tokenizer.json of a model folder; say what a folder without one contains instead."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from ssd.errors import UserError, missing_extra

if TYPE_CHECKING:
    from tokenizers import Tokenizer

TOKENIZER_FILE = "tokenizer.json"
OTHER_FORMATS = {
    "tekken.json": "a tokenizer of Mistral (tekken.json)",
    "*.tiktoken": "a tokenizer of tiktoken (*.tiktoken)",
    "tokenizer.model": "a tokenizer of SentencePiece (tokenizer.model)",
    "tokenizer.model.*": "a tokenizer of SentencePiece or Mistral (tokenizer.model.*)",
    "spiece.model": "a tokenizer of SentencePiece (spiece.model)",
    "vocab.json": "a tokenizer of transformers in the older format (vocab.json)",
}
CONVERSION = (
    "convert it with transformers: AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}'), in an "
    "environment with the packages sentencepiece, tiktoken and mistral-common"
)
GGUF = "is GGUF; give the folder of the model that it was converted from, which has a tokenizer.json"
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LFS_POINTER = b"version https://git-lfs"


def load_tokenizer(folder: Path) -> Tokenizer:
    """Return the tokenizer of a model folder.

    Raises UserError if there is no usable tokenizer.json, which says why, or if the tokenizers library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_extra("--tokenizer needs tokenizers", "text") from None
    path = folder / TOKENIZER_FILE
    if not path.is_file():
        raise UserError(f"--tokenizer: {_why_missing(folder)}")
    try:
        if path.read_bytes().startswith(LFS_POINTER):
            raise UserError(
                f"--tokenizer: {path} is a pointer of Git LFS, not the file; run git lfs pull in its folder"
            )
        return Tokenizer.from_file(str(path))
    except UserError:
        raise
    except Exception as problem:  # The library raises bare exceptions.
        raise UserError(f"--tokenizer: {path} cannot be read ({problem}); download it again") from None


def _why_missing(folder: Path) -> str:
    """Return what is in the place of a model folder with a tokenizer.json."""
    if not folder.exists():
        if HUB_NAME.fullmatch(str(folder)):
            download = f"if it is a name on the Hugging Face hub, run: hf download {folder} --local-dir FOLDER"
            return f"there is no folder {folder}; {download}, and give that folder"
        return f"there is no folder {folder}; give the folder of a model"
    if not folder.is_dir():
        if folder.suffix.lower() == ".gguf":
            return f"{folder} {GGUF}"
        return f"{folder} is a file; give the folder of the model, with its {TOKENIZER_FILE}"
    for pattern, name in OTHER_FORMATS.items():
        if any(folder.glob(pattern)):
            return f"{folder} has {name} and no {TOKENIZER_FILE}; {CONVERSION.format(folder=folder)}"
    if any(folder.glob("*.gguf")):
        return f"{folder} {GGUF}"
    return f"{folder} has no {TOKENIZER_FILE}; give the folder of a model"
