"""Find where outputs of the demonstration end.

Greedy decoding of a small model soon repeats itself, and a loop is trivial to draft. Outputs therefore end where a
programmer would stop reading, see `end_of_block`. The ends are found in an untimed run and passed to both engines as
`max_tokens`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np

from engine.engine import Engine
from engine.models.tokenizer import Detokenizer, Tokenizer
from engine.scheduling.request import Request

MAX_LINE = 100
"""Characters; few lines of the standard library are longer."""

DEFINITION = re.compile(r"^([ \t]*)(?:async )?def ", re.MULTILINE)


def end_of_block(prompt: str, text: str) -> int | None:
    """Return the number of leading characters of `text` that belong to the output; None if it has not ended.

    `text` continues `prompt`, which ends within a function. The output ends with the function, that is before a line
    that is not indented deeper than the function's `def`; before a line that the output already has; and after
    `MAX_LINE` characters of one line. Prompts without a `def` have no function to end.
    """
    definitions = DEFINITION.findall(prompt)
    indentation = len(definitions[-1]) if definitions else -1
    lines = text.split("\n")
    earlier: set[str] = set()
    position = 0
    for number, line in enumerate(lines):
        if line.strip():
            is_complete = number < len(lines) - 1
            if len(line) - len(line.lstrip()) <= indentation or (is_complete and line in earlier):
                return position
            if len(line) > MAX_LINE:
                return position + MAX_LINE
            earlier.add(line)
        position += len(line) + 1
    return None


def find_lengths(
    engine: Engine, tokenizer: Tokenizer, requests: Sequence[Request], prompts: Sequence[str]
) -> list[int]:
    """Return the number of tokens after which each request's output ends, at most its `max_tokens` and at least 1.

    prompts: the text of each request's prompt. The outputs do not depend on the engine's drafter or batch.
    """
    outputs = {
        engine.add(request): _GrowingOutput(prompt, Detokenizer(tokenizer.decode, request.prompt))
        for request, prompt in zip(requests, prompts, strict=True)
    }
    running = set(outputs)
    while running:
        report = engine.step()
        for sequence_id, tokens in report.tokens.items():
            output = outputs[sequence_id]
            output.extend(tokens)
            if output.has_ended and sequence_id not in report.finished:
                engine.cancel(sequence_id)
                running.discard(sequence_id)
        running -= set(report.finished)
    return [output.length for output in outputs.values()]


class _GrowingOutput:
    """Tokens of one output, up to where its block ends."""

    def __init__(self, prompt: str, detokenizer: Detokenizer) -> None:
        self.has_ended = False
        self._prompt = prompt
        self._detokenizer = detokenizer
        self._text = ""
        self._characters: list[int] = []
        """Length of the text after each token."""

    @property
    def length(self) -> int:
        """Number of tokens of the output, 1 or more."""
        return max(1, len(self._characters))

    def extend(self, tokens: np.ndarray) -> None:
        """Append tokens, uint32 [n]; those after the end of the block are left out."""
        for token in tokens.tolist():
            self._text += self._detokenizer.feed(token)
            self._characters.append(len(self._text))
        end = end_of_block(self._prompt, self._text)
        if end is not None:
            self.has_ended = True
            del self._characters[int(np.searchsorted(self._characters, end)) + 1 :]
