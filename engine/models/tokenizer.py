"""Text to token ids and back, by the tokenizer.json of a model folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HubTokenizer

from ssd.errors import UserError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """The vocabulary of one model."""

    def __init__(self, folder: Path) -> None:
        """Raises UserError if `folder` has no usable tokenizer.json."""
        path = folder / TOKENIZER_FILE
        if not path.exists():
            raise UserError(f"{folder} has no {TOKENIZER_FILE}; download or copy it again")
        try:
            self._tokenizer = HubTokenizer.from_file(str(path))
        except Exception as problem:  # The library raises bare exceptions.
            raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
        # Files keep the settings of the training that they come from.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Token ids of a prompt, uint32 [N], by default with the special tokens that the model's prompts begin with.

        Raises UserError for a text that has no UTF-8 form, such as one made of undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is no valid Unicode text; give it in UTF-8") from None
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.uint32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of token ids, special tokens left out."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def decode_behind(self, prompt: np.ndarray, tokens: np.ndarray) -> str:
        """The text that `tokens` add to that of `prompt`; some vocabularies drop a space where a text begins."""
        head, whole = self.decode(prompt), self.decode(np.concatenate((prompt, tokens)))
        return whole[len(head) :] if whole.startswith(head) else self.decode(tokens)
