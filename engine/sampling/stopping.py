"""Find the end of an output: end tokens, stop tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.models.tokenizer import Decode, Detokenizer
from engine.scheduling.request import FinishReason, Request


class Cut(NamedTuple):
    """The part of a step's tokens that belongs to the output, and whether the output ends after it."""

    length: int
    """Number of leading tokens that belong to the output."""
    reason: FinishReason | None = None
    """Why the output ends; None if it does not."""
    stop_reason: str | int | None = None
    """See `Completion.stop_reason`."""


class Stopping:
    """Finds the end of one request's output, from committed tokens only."""

    def __init__(self, request: Request, eos_token_ids: Iterable[int] = (), decode: Decode | None = None) -> None:
        """`decode` is needed only for stop strings."""
        sampling = request.sampling
        self.end_ids = np.array(sorted({*sampling.stop_token_ids, *eos_token_ids}), np.int64)
        """Tokens that `min_tokens` forbids."""
        self._eos = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._stop_tokens = frozenset(sampling.stop_token_ids)
        self._strings: StopStrings | None = None
        if sampling.stop:
            assert decode is not None, "stop strings without a tokenizer"
            self._strings = StopStrings(sampling.stop, sampling.min_tokens, Detokenizer(decode, request.prompt))

    @property
    def is_by_end_tokens(self) -> bool:
        """Whether only the model's end tokens and the largest length end the output."""
        return self._strings is None and not self._stop_tokens

    def cut(self, tokens: np.ndarray, room: int) -> Cut:
        """Find the end of the output in `tokens`, uint32 [n], which follow those of earlier calls.

        room: number of tokens that the output may still have.
        """
        for index, token in enumerate(tokens.tolist()):
            if token in self._eos:
                return Cut(index + 1, FinishReason.STOP)
            if token in self._stop_tokens:
                return Cut(index + 1, FinishReason.STOP, token)
            if self._strings is not None and (found := self._strings.feed(token)) is not None:
                return Cut(index + 1, FinishReason.STOP, found)
        return Cut(len(tokens), FinishReason.LENGTH if len(tokens) == room else None)

    def text(self) -> str | None:
        """Return the text of an output that has ended; None if the request has no stop strings."""
        return None if self._strings is None else self._strings.finish()


class StopStrings:
    """The text of an output up to the first stop string.

    The first stop string is the one that ends first; of two that end together, the longer one. So the result does not
    depend on how the text is divided into tokens.
    """

    def __init__(self, stops: tuple[str, ...], min_tokens: int, detokenizer: Detokenizer) -> None:
        """Stop strings that are complete within the first `min_tokens` tokens are ignored."""
        self._stops = stops
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._tokens = 0
        self._text = ""
        self._found: str | None = None

    def feed(self, token: int) -> str | None:
        """Append a token; return the stop string that it completes, or None."""
        searched = len(self._text)
        self._text += self._detokenizer.feed(token)
        self._tokens += 1
        if self._tokens > self._min_tokens:
            matches = []
            for stop in self._stops:
                start = self._text.find(stop, max(0, searched - len(stop) + 1))
                if start >= 0:
                    matches.append((start + len(stop), start, stop))
            if matches:
                _, start, self._found = min(matches)
                self._text = self._text[:start]
        return self._found

    def finish(self) -> str:
        """Return the whole text of an output that has ended."""
        return self._text if self._found is not None else self._text + self._detokenizer.finish()
