"""The tokenizer of a model: texts to token ids in bounded memory, and what a folder without one has instead."""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from drafter_service.client.gguf import gguf_tokenizer, is_gguf
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
    "convert it with transformers, sentencepiece and tiktoken: "
    "AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')"
)
HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
LFS_POINTER = b"version https://git-lfs"
CHARS_AT_ONCE = 1 << 18
"""Characters per call of the library: it needs hundreds of bytes per token, but uses fewer threads for small calls."""
SEAM = re.compile(r"(?<=[^\W\d_])(?=[^\w'\u2019]\w)")
"""Places where texts may be split: before a character that is neither of a word nor an apostrophe, between words."""
SEAM_CHARS = 128
"""Characters on both sides of a seam whose tokens must be the same when they are split."""
SEAMS_TRIED = 50


def load_tokenizer(path: str | Path) -> Tokenizer:
    """Return the tokenizer of a model folder or GGUF file.

    Raises UserError if there is no usable one, which says why, and if a library is missing.
    """
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise missing_extra("the tokenizer of a model needs tokenizers", "text") from None
    path = Path(path)
    is_folder = not is_gguf(path)
    file = path / TOKENIZER_FILE if is_folder else path
    for one in (path, file):
        if one.is_file() and _begins_with(one, LFS_POINTER):
            raise UserError(f"{one} is a pointer of Git LFS, not the file; run git lfs pull in its folder")
    if not file.is_file():
        raise UserError(_why_missing(path))
    try:
        return Tokenizer.from_file(str(file)) if is_folder else gguf_tokenizer(file)
    except UserError:
        raise
    except Exception as problem:  # The library raises bare exceptions.
        raise UserError(f"the tokenizer in {file} cannot be read ({problem}); download or copy it again") from None


def _begins_with(path: Path, head: bytes) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(head)) == head
    except OSError:
        return False


def _why_missing(folder: Path) -> str:
    """Return what is in the place of a model folder with a tokenizer.json, or of a GGUF file."""
    if folder.suffix == ".gguf" and not folder.is_dir():
        return f"{folder} is not a GGUF file; download it again" if folder.exists() else f"there is no file {folder}"
    if not folder.exists():
        if HUB_NAME.fullmatch(str(folder)):
            download = f"if it is a name on the Hugging Face hub, run: hf download {folder} --local-dir FOLDER"
            return f"there is no folder {folder}; {download}, and give that folder"
        return f"there is no folder {folder}; give the folder of a model"
    if not folder.is_dir():
        return f"{folder} is a file; give the folder of the model, with its {TOKENIZER_FILE}"
    for pattern, name in OTHER_FORMATS.items():
        if any(folder.glob(pattern)):
            return f"{folder} has {name} and no {TOKENIZER_FILE}; {CONVERSION.format(folder=folder)}"
    if files := sorted(folder.glob("*.gguf")):
        which = f"its GGUF file, {files[0]}" if len(files) == 1 else f"one of its GGUF files, such as {files[0]}"
        return f"{folder} has no {TOKENIZER_FILE}; give {which}"
    return f"{folder} has no {TOKENIZER_FILE}; give the folder of a model"


class TextTokenizer:
    """The tokenizer of one model. Any thread may use it."""

    def __init__(self, folder: Path, *, special_as_text: bool = False) -> None:
        """Load the tokenizer of a model folder or GGUF file; errors as in `load_tokenizer`.

        special_as_text: whether the names of special tokens, such as "<s>", are tokenized as other text.
        """
        self._tokenizer = load_tokenizer(folder)
        self._tokenizer.encode_special_tokens = special_as_text
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Return the token ids of each text, uint32 [N], without special tokens around it.

        Long texts are tokenized in pieces, where that gives the same tokens.
        """
        pieces = [list(self._pieces(text)) for text in texts]
        encoded = (
            np.frombuffer(array("I", encoding.ids), np.uint32)
            for group in _groups(piece for of_text in pieces for piece in of_text)
            for encoding in self._tokenizer.encode_batch_fast(group, add_special_tokens=False)
        )
        parts = ([next(encoded) for _ in of_text] for of_text in pieces)
        return [part[0] if len(part) == 1 else np.concatenate(part) for part in parts]

    def decode(self, ids: np.ndarray) -> str:
        """Return the text of token ids, special tokens included."""
        return self._tokenizer.decode(ids.tolist(), skip_special_tokens=False)

    def _pieces(self, text: str) -> Iterator[str]:
        """Yield parts of a text that are tokenized as the whole text is.

        The last part is long if the tokenizer cannot be split. A text without words is split anywhere.
        """
        first = 0
        while len(text) - first > 2 * CHARS_AT_ONCE and (seam := self._seam(text, first + CHARS_AT_ONCE)):
            end, following = seam
            yield text[first:end]
            first = following
        yield text[first:]

    def _seam(self, text: str, first: int) -> tuple[int, int] | None:
        """Return the end of a piece and the beginning of the next; None if pieces have other tokens than the whole.

        A tokenizer that adds a space before each text has one character less between them.
        """
        at = None
        for match in islice(SEAM.finditer(text, first, first + CHARS_AT_ONCE), SEAMS_TRIED):
            at = match.start()
            before, after = text[at - SEAM_CHARS : at], text[at : at + SEAM_CHARS]
            whole, left = (self._ids(part) for part in (before + after, before))
            for dropped in (0, 1) if after[0] == " " else (0,):
                if left + self._ids(after[dropped:]) == whole:
                    return at, at + dropped
        return (first, first) if at is None else None

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Yield groups of texts, each for one call of the library."""
    group: list[str] = []
    chars = 0
    for text in texts:
        group.append(text)
        chars += len(text)
        if chars >= CHARS_AT_ONCE:
            yield group
            group, chars = [], 0
    if group:
        yield group
