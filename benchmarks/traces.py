"""Recorded traffic: requests whose greedy output is known.

A trace is an .npz file: `tokens` uint32, all requests in a row, prompt then output; and for each request, in arrival
order, int32 `prompt_len`, `output_len` and `session` (turns of one conversation share it).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

VOCABULARY = 50_000
SOURCE_TOKENS = 4_000
COPIES = 10


@dataclass(frozen=True, eq=False)
class Request:
    """One prompt and what the target made of it."""

    tokens: np.ndarray
    """uint32 [P + O]: the prompt, then the output."""
    prompt_length: int
    session: int

    @property
    def prompt(self) -> np.ndarray:
        """uint32 [P]."""
        return self.tokens[: self.prompt_length]

    @property
    def output(self) -> np.ndarray:
        """uint32 [O]."""
        return self.tokens[self.prompt_length :]


@dataclass(frozen=True, eq=False)
class Trace:
    """Requests in arrival order; each has at least one token of output."""

    name: str
    requests: list[Request]

    @property
    def output_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(request.output) for request in self.requests)

    def first(self, output_tokens: int) -> Trace:
        """The requests that make up the first `output_tokens` output tokens, the last of them cut short."""
        kept, left = [], output_tokens
        for request in self.requests:
            if left <= 0:
                break
            kept.append(replace(request, tokens=request.tokens[: request.prompt_length + left]))
            left -= len(request.output)
        return Trace(self.name, kept)


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises ValueError for a file that is none."""
    try:
        with np.load(path) as arrays:
            tokens, prompts, outputs, sessions = (
                arrays[name] for name in ("tokens", "prompt_len", "output_len", "session")
            )
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{path} is not a trace: {error}") from error
    ends = np.cumsum(prompts.astype(np.int64) + outputs)
    if len(ends) == 0 or ends[-1] != len(tokens):
        raise ValueError(f"{path} is not a trace: its lengths do not add up to its {len(tokens):,} tokens")
    tokens = tokens.astype(np.uint32)
    requests = [
        Request(tokens[end - prompt - output : end], prompt, session)
        for end, prompt, output, session in zip(
            ends.tolist(), prompts.tolist(), outputs.tolist(), sessions.tolist(), strict=True
        )
        if output > 0
    ]
    return Trace(path.stem, requests)


def copy_edit(every: int) -> Trace:
    """Outputs that copy their random prompts, with another random token in place of each `every`-th one."""
    rng = np.random.default_rng(0)
    requests = []
    for session in range(COPIES):
        source = rng.integers(0, VOCABULARY, SOURCE_TOKENS, np.uint32)
        edited = source.copy()
        # 1 to VOCABULARY - 1 further on, round the vocabulary, is any token but the one that stood there.
        edited[every - 1 :: every] += rng.integers(1, VOCABULARY, len(edited[every - 1 :: every]), np.uint32)
        requests.append(Request(np.concatenate((source, edited % VOCABULARY)), SOURCE_TOKENS, session))
    return Trace(f"copy-edit-{every}", requests)
