"""Where an output ends: end tokens, stop tokens, stop strings, length."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from engine.models.detokenize import Decode, Detokenizer
from engine.scheduling.request import FinishReason, Request


class Cut(NamedTuple):
    """How much of what a step produced belongs to the output."""

    length: int
    """Leading tokens that do."""
    reason: FinishReason | None = None
    """Why the output ends behind them, if it does."""
    stop_reason: str | int | None = None
    """As in `Completion`."""


class Stopping:
    """Watches the output of one request. Follows committed tokens alone, so drafts do not matter to it."""

    def __init__(self, request: Request, eos_token_ids: Iterable[int] = (), decode: Decode | None = None) -> None:
        """`decode` is needed for stop strings alone."""
        sampling = request.sampling
        self.end_ids = np.array(sorted({*sampling.stop_token_ids, *eos_token_ids}), np.int64)
        """Tokens that `min_tokens` forbids."""
        self._ends = frozenset(() if sampling.ignore_eos else eos_token_ids)
        self._stops = frozenset(sampling.stop_token_ids)
        self._strings: StopStrings | None = None
        if sampling.stop:
            assert decode is not None, "stop strings without a tokenizer"
            self._strings = StopStrings(sampling.stop, sampling.min_tokens, Detokenizer(decode, request.prompt))

    def cut(self, tokens: np.ndarray, room: int) -> Cut:
        """What of `tokens`, uint32 [n] behind those of earlier calls, is output; `room` is the most that may be."""
        for index, token in enumerate(tokens.tolist()):
            if token in self._ends:
                return Cut(index + 1, FinishReason.STOP)
            if token in self._stops:
                return Cut(index + 1, FinishReason.STOP, token)
            if self._strings is not None and (found := self._strings.feed(token)) is not None:
                return Cut(index + 1, FinishReason.STOP, found)
        return Cut(len(tokens), FinishReason.LENGTH if len(tokens) == room else None)

    def text(self) -> str | None:
        """The text of an output that has ended, if it was watched for strings."""
        return None if self._strings is None else self._strings.finish()


class StopStrings:
    """The text of an output, up to the first stop string in it.

    The first is the one whose last character comes first, and of two that end together the longer. So it does not
    matter how the text is cut into tokens.
    """

    def __init__(self, stops: tuple[str, ...], min_tokens: int, detokenizer: Detokenizer) -> None:
        """What the first `min_tokens` tokens complete does not count."""
        self._stops = stops
        self._min_tokens = min_tokens
        self._detokenizer = detokenizer
        self._tokens = 0
        self._text = ""
        self._found: str | None = None

    def feed(self, token: int) -> str | None:
        """The stop string that `token` completes."""
        searched = len(self._text)
        self._text += self._detokenizer.feed(token)
        self._tokens += 1
        if self._tokens > self._min_tokens:
            places = []
            for stop in self._stops:
                start = self._text.find(stop, max(0, searched - len(stop) + 1))
                if start >= 0:
                    places.append((start + len(stop), start, stop))
            if places:
                _, start, self._found = min(places)
                self._text = self._text[:start]
        return self._found

    def finish(self) -> str:
        """The whole text, now that nothing follows."""
        return self._text if self._found is not None else self._text + self._detokenizer.finish()
