"""Completions to where the user wants them, in the order of the prompts, each as soon as its turn has come."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TextIO

from engine.models.tokenizer import Tokenizer
from engine.sampling.logprobs import Logprobs
from engine.scheduling.request import Completion, Request
from ssd.errors import UserError

Prompt = str | list[int]
"""Text, or token ids."""


class CompletionWriter:
    """Writes JSON lines to a file as completions come, or plain text to stdout once all have."""

    def __init__(
        self, prompts: Sequence[Prompt], requests: Sequence[Request], tokenizer: Tokenizer, path: Path | None
    ) -> None:
        """`requests`: equally many for each prompt, in their order. Raises UserError if `path` cannot be written."""
        self._prompts = prompts
        self._requests = requests
        self._samples = len(requests) // len(prompts)
        self._tokenizer = tokenizer
        self._path = path
        self._waiting: dict[int, Completion] = {}
        self._next = 0
        try:
            self._file = None if path is None else _opened(path)
        except OSError as problem:
            raise self._refusal(problem) from None

    def take(self, finished: Mapping[int, Completion]) -> None:
        """Note completions by the index of their request, and write those whose turn has come to the file."""
        self._waiting.update(finished)
        while self._file is not None and self._next in self._waiting:
            self._write_line(self._file, self._next)
            self._next += 1

    def close(self) -> None:
        """Write what is left; after an interruption that is whatever had finished."""
        for index in sorted(self._waiting):
            if self._file is not None:
                self._write_line(self._file, index)
            else:
                self._print(index)
        if self._file is not None and self._file is not sys.stdout:
            self._file.close()

    def _write_line(self, file: TextIO, index: int) -> None:
        completion = self._waiting[index]
        prompt, sample = divmod(index, self._samples)
        line = {
            "index": prompt,
            "sample": sample,
            "prompt": self._prompts[prompt],
            "completion": self._text(index),
            "tokens": completion.tokens.tolist(),
            "finish_reason": completion.finish_reason.value,
            "stop_reason": completion.stop_reason,
        }
        if completion.logprobs is not None:
            line["logprobs"] = _as_json(completion.logprobs)
        if completion.prompt_logprobs is not None:
            line["prompt_tokens"] = self._requests[index].prompt.tolist()
            line["prompt_logprobs"] = [None, *_as_json(completion.prompt_logprobs)]
        try:
            file.write(json.dumps(line) + "\n")
            file.flush()
        except OSError as problem:
            # What could not be written must not be tried again at the end.
            self._waiting.clear()
            self._file = None
            raise self._refusal(problem) from None
        del self._waiting[index]

    def _print(self, index: int) -> None:
        prompt = self._prompts[index // self._samples]
        shown = prompt if isinstance(prompt, str) else f"<{len(prompt)} token ids>"
        sys.stdout.write(f"{shown}{self._text(index)}\n")
        if len(self._requests) > 1:
            sys.stdout.write("-" * 40 + "\n")

    def _text(self, index: int) -> str:
        completion = self._waiting[index]
        if completion.text is not None:
            return completion.text
        return self._tokenizer.decode_behind(self._requests[index].prompt, completion.content)

    def _refusal(self, problem: OSError) -> UserError:
        return UserError(f"cannot write {self._path}: {problem.strerror}")


def _opened(path: Path) -> TextIO:
    return sys.stdout if str(path) == "-" else path.open("w", encoding="utf-8")


def _as_json(logprobs: Logprobs) -> list[dict[str, object]]:
    """A record for each token, with its likeliest alternatives as pairs of token id and log-probability."""
    return [
        {"logprob": own, "rank": rank, "top": list(zip(top_ids, top, strict=True))}
        for own, rank, top_ids, top in zip(
            logprobs.tokens.tolist(),
            logprobs.ranks.tolist(),
            logprobs.top_ids.tolist(),
            logprobs.top.tolist(),
            strict=True,
        )
    ]
