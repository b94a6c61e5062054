"""Text to token ids, by the tokenizer and the chat template of a model folder."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drafter_service.ingest.chat_template import ChatTemplate
from ssd.errors import UserError

TOKENIZER_FILE = "tokenizer.json"
CHARS_AT_ONCE = 1 << 18
"""The library holds some hundred bytes for each token of a call; smaller calls keep its threads less busy."""


class Vocabulary:
    """How one model reads text. Any thread may use it."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if `folder` has no usable tokenizer.json, or the tokenizers library is missing."""
        try:
            from tokenizers import Tokenizer
        except ImportError:
            raise UserError("--tokenizer needs tokenizers; run: pip install 'ssd-drafter[text]'") from None

        path = folder / TOKENIZER_FILE
        if not path.exists():
            raise UserError(f"--tokenizer: {folder} has no {TOKENIZER_FILE}; give the folder of a model")
        try:
            self._tokenizer = Tokenizer.from_file(str(path))
        except Exception as problem:  # The library raises bare exceptions.
            raise UserError(f"--tokenizer: {path} cannot be read ({problem}); download it again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.chat = ChatTemplate(folder)

    def encode(self, texts: list[str]) -> list[np.ndarray]:
        """Token ids of each text, uint32 [N], without what a tokenizer puts around a prompt."""
        return [
            np.frombuffer(array("I", encoding.ids), np.uint32)
            for some in _calls(texts)
            for encoding in self._tokenizer.encode_batch_fast(some, add_special_tokens=False)
        ]


def _calls(texts: list[str]) -> Iterator[list[str]]:
    """The texts, so many at once as one call of the library should have."""
    some: list[str] = []
    chars = 0
    for text in texts:
        some.append(text)
        chars += len(text)
        if chars >= CHARS_AT_ONCE:
            yield some
            some, chars = [], 0
    if some:
        yield some
