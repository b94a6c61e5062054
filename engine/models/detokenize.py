"""Tokens to text as they come."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Decode = Callable[[np.ndarray], str]
"""The text of token ids, uint32."""

PROMPT_TAIL = 8
"""Prompt tokens that the first decoding begins with, as a vocabulary may drop a space where a text begins."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What decoders make of bytes that are no whole character."""


class Detokenizer:
    """The text that an output adds to its prompt, token by token.

    Text comes out as soon as it is certain: the bytes of a character may lie in several tokens, so replacement
    characters at the end are held back until a later token decides. The library's own stream holds back everything
    that such a token brought, and has no end.
    """

    def __init__(self, decode: Decode, prompt: np.ndarray) -> None:
        """prompt: uint32 [P]."""
        self._decode = decode
        self._window: list[int] = _tail(decode, prompt).tolist()
        """The last tokens: those after `settled`, and some before for their company."""
        self._settled = len(self._window)
        """Leading tokens of the window whose text is out."""
        self._out = len(self._text().rstrip(UNFINISHED))
        """Leading characters of the window's text that are out."""

    def feed(self, token: int) -> str:
        """The text that is certain now, and was not before."""
        self._window.append(token)
        text = self._text()
        certain = text.rstrip(UNFINISHED)
        new = certain[self._out :]
        self._out = max(self._out, len(certain))
        if new and len(certain) == len(text):
            del self._window[: self._settled]
            self._settled = len(self._window)
            self._out = len(self._text())
        return new

    def finish(self) -> str:
        """What was held back, now that nothing follows."""
        return self._text()[self._out :]

    def _text(self) -> str:
        return self._decode(np.array(self._window, np.uint32))


def _tail(decode: Decode, prompt: np.ndarray) -> np.ndarray:
    """The prompt's last tokens; more of them where they begin within a character, whose bytes then are none."""
    size = PROMPT_TAIL
    while size < len(prompt) and decode(prompt[-size:]).endswith(UNFINISHED):
        size *= 2
    return prompt[-size:]
