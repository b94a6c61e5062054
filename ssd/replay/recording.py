"""Recordings: requests with their prompts and outputs, in the order in which they were recorded."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple
from zipfile import BadZipFile

import numpy as np

from ssd.corpus.ring import MAX_TOKEN_ID

LENGTHS = ("prompt_len", "output_len")
NAMES = ("session", "group", "version")
"""Optional arrays of a file, whose negative numbers mean that a request has none."""
COLUMNS = {"sessions": -1, "groups": -1, "versions": -1, "users": -1, "began_s": np.nan, "ended_s": np.nan}
"""Optional columns of a recording, with the value of requests for which they are not known."""


class RecordedRequest(NamedTuple):
    """A request and the output that the target produced."""

    prompt: np.ndarray
    """uint32 [P]."""
    output: np.ndarray
    """uint32 [O]."""
    session: int = -1
    """Number of its conversation, -1 for none."""
    group: int = -1
    """Number of the problem that it samples, -1 for none."""
    version: int = -1
    """Training step of the policy that produced it, -1 for none."""


@dataclass(frozen=True, eq=False)
class Recording:
    """R requests. The first ones arrived first, unless `began_s` says otherwise."""

    tokens: np.ndarray
    """uint32 [T]: the prompt and the output of each request, one after another."""
    starts: np.ndarray
    """int64 [R + 1]: request i is `tokens[starts[i]:starts[i + 1]]`."""
    prompt_lengths: np.ndarray
    """int64 [R]."""
    sessions: np.ndarray
    """int64 [R]: number of the request's conversation, -1 for none."""
    groups: np.ndarray
    """int64 [R]: number of the problem that it samples, -1 for none."""
    versions: np.ndarray
    """int64 [R]: training step of the policy that produced it, -1 for none."""
    users: np.ndarray
    """int64 [R]: number of its user, -1 where that is unknown."""
    began_s: np.ndarray
    """float64 [R]: time at which it arrived, in seconds since the epoch; NaN where that is unknown."""
    ended_s: np.ndarray
    """float64 [R]: time at which its output was complete, like `began_s`."""
    name: str = ""

    @classmethod
    def from_arrays(
        cls,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        output_lengths: np.ndarray,
        *,
        name: str = "",
        **columns: np.ndarray,
    ) -> Recording:
        """Return the recording with these tokens, uint32 [T], and lengths, [R].

        columns: those of `sessions`, `groups`, `versions`, `users`, `began_s` and `ended_s` that are known.
        """
        columns = {name: np.full(len(prompt_lengths), unknown) for name, unknown in COLUMNS.items()} | columns
        prompts = np.asarray(prompt_lengths, np.int64)
        starts = np.append(0, np.cumsum(prompts + np.asarray(output_lengths, np.int64)))
        return cls(tokens=tokens, starts=starts, prompt_lengths=prompts, name=name, **columns)

    @classmethod
    def of(cls, requests: Iterable[RecordedRequest], name: str = "") -> Recording:
        """Return the recording of these requests, in the order in which they arrived."""
        requests = list(requests)
        prompts, outputs, sessions, groups, versions = zip(*requests, strict=True) if requests else ((),) * 5
        parts = [part for request in requests for part in (request.prompt, request.output)]
        return cls.from_arrays(
            np.concatenate([*parts, np.empty(0, np.uint32)], dtype=np.uint32),
            np.array([len(prompt) for prompt in prompts], np.int64),
            np.array([len(output) for output in outputs], np.int64),
            name=name,
            sessions=np.array(sessions, np.int64),
            groups=np.array(groups, np.int64),
            versions=np.array(versions, np.int64),
        )

    @classmethod
    def load(cls, path: Path) -> Recording:
        """Read an .npz file; requests without output are left out. Raises ValueError for another file.

        It has `tokens`: the prompts and outputs of all requests in order of arrival; for each request the numbers of
        tokens `prompt_len` and `output_len`; and optionally `session`, `group` and `version` (see `RecordedRequest`).
        """
        try:
            recording = cls._read(path)
        except (OSError, EOFError, KeyError, TypeError, ValueError, BadZipFile, zlib.error) as error:
            raise ValueError(f"{path} is not a recording: {error}") from error
        has_output = recording.output_lengths > 0
        if not has_output.any():
            raise ValueError(f"{path} is not a recording: it has no output")
        return recording if has_output.all() else recording.take(np.flatnonzero(has_output))

    @classmethod
    def _read(cls, path: Path) -> Recording:
        with np.load(path) as file:
            arrays = {name: file[name] for name in ("tokens", *LENGTHS, *NAMES) if name in file or name not in NAMES}
        for name, array in arrays.items():
            if array.dtype.kind not in "iu" or array.ndim != 1 or (name not in NAMES and (array < 0).any()):
                raise ValueError(f"{name} is not a 1-D array of non-negative integers")
        tokens, prompts, outputs = (arrays.pop(name) for name in ("tokens", *LENGTHS))
        if any(len(array) != len(prompts) for array in (outputs, *arrays.values())):
            raise ValueError(f"{', '.join((*LENGTHS, *arrays))} are not equally long")
        if int(prompts.sum(dtype=np.int64) + outputs.sum(dtype=np.int64)) != len(tokens):
            raise ValueError(f"its lengths do not add up to its {len(tokens):,} tokens")
        if len(tokens) and int(tokens.max()) > MAX_TOKEN_ID:
            raise ValueError(f"it has the token id {int(tokens.max()):,}; the largest possible is {MAX_TOKEN_ID:,}")
        columns = {f"{name}s": array.astype(np.int64) for name, array in arrays.items()}
        return cls.from_arrays(tokens.astype(np.uint32), prompts, outputs, name=path.stem, **columns)

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def output_lengths(self) -> np.ndarray:
        """int64 [R]."""
        return np.diff(self.starts) - self.prompt_lengths

    @property
    def output_tokens(self) -> int:
        """Number of output tokens of all requests."""
        return int(self.output_lengths.sum())

    @property
    def requests(self) -> list[RecordedRequest]:
        """The requests, in the order of the arrays."""
        starts, ends = self.starts[:-1], self.starts[1:]
        columns = (starts, starts + self.prompt_lengths, ends, self.sessions, self.groups, self.versions)
        return [
            RecordedRequest(np.asarray(self.tokens[start:output]), np.asarray(self.tokens[output:end]), *names)
            for start, output, end, *names in np.column_stack(columns).tolist()
        ]

    def prompt(self, request: int) -> np.ndarray:
        """Return the prompt of a request, uint32 [P]."""
        start = self.starts[request]
        return np.asarray(self.tokens[start : start + self.prompt_lengths[request]])

    @property
    def has_times(self) -> bool:
        """Whether all requests have a time of arrival."""
        return len(self) > 0 and bool(np.isfinite(self.began_s).all())

    def in_order(self) -> np.ndarray:
        """Return the requests in the order of their arrival, int64 [R]; in that of the arrays if times are missing."""
        return np.argsort(self.began_s, kind="stable") if self.has_times else np.arange(len(self))

    def concurrency(self) -> np.ndarray | None:
        """Return the number of requests that were running when each of them began, itself included, int64 [R].

        None if the times of both ends of all requests are not known.
        """
        if not self.has_times or not np.isfinite(self.ended_s).all():
            return None
        began, ended = np.sort(self.began_s), np.sort(np.maximum(self.ended_s, self.began_s))
        running = np.searchsorted(began, self.began_s, "right") - np.searchsorted(ended, self.began_s, "left")
        return np.maximum(running, 1)

    def first(self, output_tokens: int) -> Recording:
        """Return the first requests in order of arrival that have `output_tokens` output tokens; the last one is cut.

        Returns all requests, in their own order, if they do not have more.
        """
        if self.output_tokens <= output_tokens:
            return self
        order = self.in_order()
        ends = np.cumsum(self.output_lengths[order])
        last = int(np.searchsorted(ends, output_tokens))
        kept, beyond = self.take(order[: last + 1]), int(ends[last]) - output_tokens
        end = int(kept.starts[-1]) - beyond
        return replace(kept, tokens=kept.tokens[:end], starts=np.append(kept.starts[:-1], end))

    def take(self, requests: Sequence[int] | np.ndarray) -> Recording:
        """Return some of the requests."""
        rows = np.asarray(requests, np.int64)
        parts = [self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows.tolist()]
        return Recording.from_arrays(
            np.concatenate([*parts, np.empty(0, np.uint32)], dtype=np.uint32),
            self.prompt_lengths[rows],
            self.output_lengths[rows],
            name=self.name,
            **{name: getattr(self, name)[rows] for name in COLUMNS},
        )
