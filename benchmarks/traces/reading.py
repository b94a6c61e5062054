"""Recorded traffic: requests whose greedy output is known.

A trace is an .npz file: `tokens` uint32, prompt and output of all requests concatenated; and for each request, in
arrival order, int32 `prompt_len`, `output_len` and `session` (equal for turns of one conversation). Optional, -1 for
none: int32 `group` (the problem that a rollout samples) and `version` (the policy's training step that produced it).
"""

from __future__ import annotations

import itertools
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from drafter_service.commands.advise.traffic import Traffic
from ssd.corpus.ring import MAX_TOKEN_ID

COLUMNS = ("tokens", "prompt_len", "output_len")
NAMES = ("session", "group", "version")
"""Arrays whose negative numbers mean that a request has none."""
OPTIONAL = ("group", "version")

VOCABULARY = 50_000
SOURCE_TOKENS = 4_000
COPIES = 10


@dataclass(frozen=True, eq=False)
class Request:
    """A prompt and the target's output."""

    tokens: np.ndarray
    """uint32 [P + O]: the prompt, then the output."""
    prompt_length: int
    session: int
    """Number of its conversation, -1 for none."""
    group: int = -1
    """Number of the problem that it samples, -1 for none."""
    version: int = -1
    """Training step of the policy that produced it, -1 for none."""

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
        """Number of output tokens of all requests."""
        return sum(len(request.output) for request in self.requests)

    def first(self, output_tokens: int) -> Trace:
        """Return the requests with the first `output_tokens` output tokens; the last request is cut."""
        kept, left = [], output_tokens
        for request in self.requests:
            if left <= 0:
                break
            kept.append(replace(request, tokens=request.tokens[: request.prompt_length + left]))
            left -= len(request.output)
        return Trace(self.name, kept)

    def halves(self) -> tuple[Trace, Trace]:
        """Return two parts with half of the output each: groups and sessions that began earlier, and the others."""
        unit_of = [_unit(number, request) for number, request in enumerate(self.requests)]
        sizes = dict.fromkeys(unit_of, 0)
        for unit, request in zip(unit_of, self.requests, strict=True):
            sizes[unit] += len(request.output)
        before = dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False))
        parts = [[], []]
        for request, unit in zip(self.requests, unit_of, strict=True):
            parts[2 * before[unit] >= self.output_tokens].append(request)

        return Trace(self.name, parts[0]), Trace(self.name, parts[1])

    def traffic(self, times: int = 1) -> Traffic:
        """Return the requests as a log without times: `times` copies one after another, with different sessions and
        versions.
        """
        lengths = np.array([len(request.tokens) for request in self.requests])
        unknown = np.full(len(lengths) * times, np.nan)
        return Traffic(
            tokens=np.concatenate([request.tokens for request in self.requests] * times),
            starts=np.append(0, np.cumsum(np.tile(lengths, times))),
            prompt_lengths=np.tile([request.prompt_length for request in self.requests], times),
            began_s=unknown,
            ended_s=unknown,
            users=np.full(len(unknown), -1),
            sessions=_renumbered([request.session for request in self.requests], times),
            groups=np.tile([request.group for request in self.requests], times),
            versions=_renumbered([request.version for request in self.requests], times),
        )


def _unit(number: int, request: Request) -> tuple[str, int]:
    """Return what a request must stay together with: its group, else its session, else nothing."""
    if request.group >= 0:
        return "group", request.group
    return ("session", request.session) if request.session >= 0 else ("request", number)


def _renumbered(numbers: list[int], times: int) -> np.ndarray:
    """Return `times` copies of numbers, each with numbers above those before it, int64 [R * times]; -1 stays."""
    once = np.array(numbers)
    copies = once + np.arange(times)[:, None] * (1 + once.max())
    return np.where(once < 0, -1, copies).ravel()


def load_trace(path: Path) -> Trace:
    """Read a trace. Raises ValueError for a file that is not a trace."""
    try:
        requests = _requests(*_arrays(path))
    except (OSError, EOFError, KeyError, TypeError, ValueError, BadZipFile, zlib.error) as error:
        raise ValueError(f"{path} is not a trace: {error}") from error
    if not requests:
        raise ValueError(f"{path} is not a trace: it has no output")
    return Trace(path.stem, requests)


def _arrays(path: Path) -> list[np.ndarray]:
    with np.load(path) as file:
        arrays = {name: file[name] for name in (*COLUMNS, *NAMES) if name in file or name not in OPTIONAL}
    for name, array in arrays.items():
        if array.dtype.kind not in "iu" or array.ndim != 1 or (name not in NAMES and (array < 0).any()):
            raise ValueError(f"{name} is not a 1-D array of non-negative integers")
    absent = np.full(len(arrays["session"]), -1)
    return [arrays.get(name, absent) for name in (*COLUMNS, *NAMES)]


def _requests(tokens: np.ndarray, prompts: np.ndarray, outputs: np.ndarray, *names: np.ndarray) -> list[Request]:
    if any(len(array) != len(prompts) for array in (outputs, *names)):
        raise ValueError(f"{', '.join((*COLUMNS[1:], *NAMES))} are not equally long")
    ends = np.cumsum(prompts.astype(np.int64) + outputs.astype(np.int64))
    if len(ends) == 0 or ends[-1] != len(tokens):
        raise ValueError(f"its lengths do not add up to its {len(tokens):,} tokens")
    if len(tokens) and int(tokens.max()) > MAX_TOKEN_ID:
        raise ValueError(f"it has the token id {int(tokens.max()):,}; the largest possible is {MAX_TOKEN_ID:,}")
    tokens = tokens.astype(np.uint32)
    return [
        Request(tokens[end - prompt - output : end], prompt, *numbers)
        for end, prompt, output, *numbers in zip(
            *(array.tolist() for array in (ends, prompts, outputs, *names)), strict=True
        )
        if output > 0
    ]


def copy_edit(every: int) -> Trace:
    """Return outputs that copy their random prompts, with every `every`-th token replaced."""
    rng = np.random.default_rng(0)
    requests = []
    for session in range(COPIES):
        source = rng.integers(0, VOCABULARY, SOURCE_TOKENS, np.uint32)
        edited = source.copy()
        # Adding 1 to VOCABULARY - 1 modulo the vocabulary gives any other token.
        edited[every - 1 :: every] += rng.integers(1, VOCABULARY, len(edited[every - 1 :: every]), np.uint32)
        requests.append(Request(np.concatenate((source, edited % VOCABULARY)), SOURCE_TOKENS, session))
    return Trace(f"copy-edit-{every}", requests)
