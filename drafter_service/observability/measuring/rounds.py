"""Run several cases in alternation, so that other load on the machine affects all of them alike."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from types import TracebackType
from typing import Self, TypeVar

Case = TypeVar("Case")
Item = TypeVar("Item")
Result = TypeVar("Result")


@dataclass
class Timer:
    """Adds up the time of its `with` blocks."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    """Processor time of all threads of this process, which says more than wall time on a busy machine."""

    def __enter__(self) -> Self:
        self._began = time.perf_counter(), time.process_time()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        wall, cpu = self._began
        self.wall_s += time.perf_counter() - wall
        self.cpu_s += time.process_time() - cpu


def alternated(cases: Mapping[Case, Callable[[Item], Result]], items: Iterable[Item]) -> Iterator[dict[Case, Result]]:
    """Yield the results of a round for each item, which every case runs; each round begins with another case."""
    names = list(cases)
    for number, item in enumerate(items):
        first = number % len(names)
        done = {name: cases[name](item) for name in [*names[first:], *names[:first]]}
        yield {name: done[name] for name in names}


def median_of(rounds: Sequence[Result], figure: Callable[[Result], float]) -> float:
    """Return the median of a figure over the rounds of a case."""
    return median(map(figure, rounds))


def median_ratio(rounds: Sequence[Result], others: Sequence[Result], figure: Callable[[Result], float]) -> float:
    """Return the median of the ratios of a figure to that of another case in the same round."""
    return median(figure(one) / figure(other) for one, other in zip(rounds, others, strict=True))


def columns(rounds: Iterable[Mapping[Case, Result]]) -> dict[Case, list[Result]]:
    """Return the results of each case, in the order of the rounds."""
    found: dict[Case, list[Result]] = {}
    for results in rounds:
        for name, result in results.items():
            found.setdefault(name, []).append(result)
    return found
