"""Convert tokens to text incrementally."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Decode = Callable[[np.ndarray], str]
"""Returns the text of token ids, uint32 [N]."""

PROMPT_TAIL = 8
"""Number of prompt tokens to decode before the output; some vocabularies drop a space at the start of a text."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""Decoded form of bytes that are not a complete character."""


class Detokenizer:
    """Text that an output adds to its prompt, token by token.

    The bytes of a character can span several tokens, so replacement characters at the end are held back until later
    tokens complete them. The `DecodeStream` of `tokenizers` holds back the whole text of such a token and cannot be
    flushed at the end.
    """

    def __init__(self, decode: Decode, prompt: np.ndarray) -> None:
        """prompt: uint32 [P]."""
        self._decode = decode
        self._window: list[int] = _tail(decode, prompt).tolist()
        """The last tokens: those after `_settled`, and some context before them."""
        self._settled = len(self._window)
        """Number of leading tokens of the window whose text was returned."""
        self._returned = len(self._text().rstrip(UNFINISHED))
        """Number of leading characters of the window's text that were returned."""

    def feed(self, token: int) -> str:
        """Append a token and return the text that is now complete."""
        self._window.append(token)
        text = self._text()
        certain = text.rstrip(UNFINISHED)
        new = certain[self._returned :]
        self._returned = max(self._returned, len(certain))
        if new and len(certain) == len(text):
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._returned = len(self._text())
        return new

    def finish(self) -> str:
        """Return the text that is held back, after the last token."""
        return self._text()[self._returned :]

    def _text(self) -> str:
        return self._decode(np.array(self._window, np.uint32))


def _tail(decode: Decode, prompt: np.ndarray) -> np.ndarray:
    """Return the last tokens of a prompt; more of them where they end within a character."""
    size = PROMPT_TAIL
    while size < len(prompt) and decode(prompt[-size:]).endswith(UNFINISHED):
        size *= 2
    return prompt[-size:]
