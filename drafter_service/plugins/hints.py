"""Hints that are texts: tokenized in a thread, because a step of the host must not wait for that."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from drafter_service.plugins.options import MAX_HINT_TOKENS
from ssd.errors import UserError

if TYPE_CHECKING:
    from drafter_service.client.tokenizer import TextTokenizer

MAX_WAITING = 64
"""Maximum number of requests whose hints wait to be tokenized; each has at most 131,072 characters in memory."""


class HintTokenizer:
    """Tokenizes texts with the tokenizer of a model folder, which is loaded for the first of them."""

    def __init__(self, folder: Path | None, report: Callable[[str, str], None]) -> None:
        """folder: None if the model has none.

        report: called with a kind of problem and the reason why texts are ignored, also in the thread.
        """
        self._folder = folder
        self._report = report
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ssd-hints")
        self._waiting: list[Future[Any]] = []

    def start(self, texts: Sequence[str]) -> Future[Any] | None:
        """Begin to tokenize the texts of a request, or return None if those of `MAX_WAITING` requests wait.

        The result, uint32 [N], is empty if that fails. Special tokens are text. The caller cancels it if the request
        ends before.
        """
        self._waiting = [each for each in self._waiting if not each.done()]
        if len(self._waiting) >= MAX_WAITING:
            self._report(
                "waiting hints", f"hints that are texts are ignored while those of {MAX_WAITING} requests wait"
            )
            return None
        self._waiting.append(self._thread.submit(self._encode, texts))
        return self._waiting[-1]

    def close(self) -> None:
        """End the thread, after the texts in progress."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    @cached_property
    def _tokenizer(self) -> TextTokenizer:
        from drafter_service.client.tokenizer import TextTokenizer

        if self._folder is None:
            raise UserError('the model\'s folder is not known; set "folder"')
        return TextTokenizer(self._folder, special_as_text=True)

    def _encode(self, texts: Sequence[str]) -> np.ndarray:
        try:
            encoded = self._tokenizer.encode(list(texts))
        except Exception as problem:  # The library raises bare exceptions, which may quote the text.
            reason = str(problem) if isinstance(problem, UserError) else type(problem).__name__
            self._report("hint texts", f"hints that are texts are ignored: {reason}")
            return np.empty(0, np.uint32)
        return np.concatenate(encoded)[:MAX_HINT_TOKENS]
