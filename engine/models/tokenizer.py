"""Convert text to token ids and back with the tokenizer.json of a model folder."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from tokenizers import Tokenizer as HubTokenizer

from ssd.errors import UserError

TOKENIZER_FILE = "tokenizer.json"


class Tokenizer:
    """Tokenizer of one model."""

    def __init__(self, folder: Path) -> None:
        """Raise UserError if `folder` has no usable tokenizer.json."""
        path = folder / TOKENIZER_FILE
        if not path.exists():
            raise UserError(f"{folder} has no {TOKENIZER_FILE}; download or copy it again")
        try:
            self._tokenizer = HubTokenizer.from_file(str(path))
        except Exception as problem:  # The library raises plain exceptions.
            raise UserError(f"{path} cannot be read ({problem}); download or copy it again") from None
        # Files can contain settings from training.
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()

    def tokens(self) -> dict[int, str]:
        """Return the vocabulary, added tokens included: the spelling of each token by its id."""
        return {token: spelling for spelling, token in self._tokenizer.get_vocab(with_added_tokens=True).items()}

    def to_json(self) -> str:
        """Return the tokenizer in the format of tokenizer.json."""
        return str(self._tokenizer.to_str())

    def encode(self, text: str, *, add_special_tokens: bool = True) -> np.ndarray:
        """Return token ids, uint32 [N], by default with the special tokens at the beginning of the model's prompts.

        Raises UserError for a text that UTF-8 cannot encode, such as one made of undecodable bytes.
        """
        try:
            text.encode()
        except UnicodeEncodeError:
            raise UserError("the prompt is not valid Unicode; encode it as UTF-8") from None
        return np.array(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids, dtype=np.uint32)

    def decode(self, tokens: np.ndarray) -> str:
        """Return the text of token ids, uint32 [N], without special tokens."""
        return str(self._tokenizer.decode(tokens.tolist(), skip_special_tokens=True))

    def decode_behind(self, prompt: np.ndarray, tokens: np.ndarray) -> str:
        """Return the text that `tokens` add to `prompt`; some vocabularies drop a space at the start of a text."""
        head, whole = self.decode(prompt), self.decode(np.concatenate((prompt, tokens)))
        return whole[len(head) :] if whole.startswith(head) else self.decode(tokens)
