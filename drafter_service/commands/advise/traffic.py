"""The requests of a log, with their times, users, sessions, groups and versions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, takewhile

import numpy as np

PAGE_SIZE = 16
"""Tokens that a prefix cache keeps or drops together, as in vLLM."""


@dataclass(frozen=True, eq=False)
class Traffic:
    """R requests in the order of the log."""

    tokens: np.ndarray
    """uint32 [T]: the prompt and the output of each request, one after another."""
    starts: np.ndarray
    """int64 [R + 1]: request i is `tokens[starts[i]:starts[i + 1]]`."""
    prompt_lengths: np.ndarray
    """int64 [R]."""
    began_s: np.ndarray
    """float64 [R]: time at which a request arrived, in seconds since the epoch; NaN where the log has none."""
    ended_s: np.ndarray
    """float64 [R]: time at which its output was complete, like `began_s`."""
    users: np.ndarray
    """int64 [R]: number of the request's user, -1 where the log has none."""
    sessions: np.ndarray
    """int64 [R]: number of its conversation, -1 where the log has none."""
    groups: np.ndarray
    """int64 [R]: number of the problem that it samples, -1 where the log has none."""
    versions: np.ndarray
    """int64 [R]: training step of the policy that produced it, -1 where the log has none."""

    def __len__(self) -> int:
        return len(self.prompt_lengths)

    @property
    def output_lengths(self) -> np.ndarray:
        """int64 [R]."""
        return np.diff(self.starts) - self.prompt_lengths

    def prompt(self, request: int) -> np.ndarray:
        """Return the prompt of a request, uint32 [P]."""
        start = self.starts[request]
        return np.asarray(self.tokens[start : start + self.prompt_lengths[request]])

    @property
    def has_times(self) -> bool:
        """Whether all requests have a time of arrival."""
        return len(self) > 0 and bool(np.isfinite(self.began_s).all())

    def in_order(self) -> np.ndarray:
        """Return the requests in the order of their arrival, int64 [R]; in that of the log if times are missing."""
        return np.argsort(self.began_s, kind="stable") if self.has_times else np.arange(len(self))

    def concurrency(self) -> np.ndarray | None:
        """Return the number of requests that were running when each of them began, itself included, int64 [R].

        None if the log does not have the times of both ends of all requests.
        """
        if not self.has_times or not np.isfinite(self.ended_s).all():
            return None
        began, ended = np.sort(self.began_s), np.sort(np.maximum(self.ended_s, self.began_s))
        running = np.searchsorted(began, self.began_s, "right") - np.searchsorted(ended, self.began_s, "left")
        return np.maximum(running, 1)

    def epochs(self) -> np.ndarray | None:
        """Return the number of lower versions in which the group of each request occurs, int64 [R].

        None if not all requests have a group and a version.
        """
        if (self.groups < 0).any() or (self.versions < 0).any():
            return None
        epochs = np.empty(len(self), np.int64)
        for group in np.unique(self.groups):
            rows = self.groups == group
            epochs[rows] = np.unique(self.versions[rows], return_inverse=True)[1]
        return epochs

    def uncached_prompt_tokens(self) -> int:
        """Return the number of prompt tokens that a target computes if its prefix cache keeps all earlier requests."""
        tokens, cached, missing = np.asarray(self.tokens), set[int](), 0
        for request in self.in_order().tolist():
            pages = _page_hashes(tokens[self.starts[request] : self.starts[request + 1]])
            found = sum(1 for _ in takewhile(cached.__contains__, pages))
            missing += max(0, int(self.prompt_lengths[request]) - found * PAGE_SIZE)
            cached.update(pages)
        return missing

    def first(self, output_tokens: int) -> Traffic:
        """Return the first requests in order of arrival that have this number of output tokens together, or more."""
        order = self.in_order()
        count = int(np.searchsorted(np.cumsum(self.output_lengths[order]), output_tokens)) + 1
        return self if count >= len(self) else self.take(order[:count])

    def take(self, requests: Sequence[int] | np.ndarray) -> Traffic:
        """Return some of the requests."""
        rows = np.asarray(requests, np.int64)
        parts = [self.tokens[self.starts[row] : self.starts[row + 1]] for row in rows.tolist()]
        lengths = np.diff(self.starts)[rows]
        return Traffic(
            tokens=np.concatenate(parts) if parts else np.empty(0, np.uint32),
            starts=np.append(0, np.cumsum(lengths)),
            prompt_lengths=self.prompt_lengths[rows],
            began_s=self.began_s[rows],
            ended_s=self.ended_s[rows],
            users=self.users[rows],
            sessions=self.sessions[rows],
            groups=self.groups[rows],
            versions=self.versions[rows],
        )


def _page_hashes(tokens: np.ndarray) -> list[int]:
    """Return a hash for each full page of a text; it identifies the text up to the end of the page."""
    pages = (tokens[at : at + PAGE_SIZE].tobytes() for at in range(0, len(tokens) - PAGE_SIZE + 1, PAGE_SIZE))
    return list(accumulate(pages, lambda before, page: hash((before, page)), initial=0))[1:]
