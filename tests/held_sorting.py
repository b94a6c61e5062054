"""An executor for `CorpusDrafter` that sorts prompts when a test says so."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Executor, Future

from ssd.base import CorpusDrafter
from ssd.sequences.local_index import Unsorted


class HeldSorting(Executor):
    """Keeps the prompts that a drafter would sort in a thread until `run` sorts them."""

    def __init__(self, drafter: CorpusDrafter) -> None:
        self._held: list[tuple[Future[Unsorted], Callable[[], Unsorted]]] = []
        drafter._sorter = self

    def submit(self, sort: Callable[[], Unsorted]) -> Future[Unsorted]:
        """Keep a prompt."""
        future: Future[Unsorted] = Future()
        self._held.append((future, sort))
        return future

    def run(self) -> None:
        """Sort the prompts, also those of sequences that have ended, as a thread that has begun does."""
        for future, sort in self._held:
            positions = sort()
            if not future.cancelled():
                future.set_result(positions)
        self._held.clear()

    def fail(self, problem: BaseException) -> None:
        """Let the sorting of all prompts fail."""
        for future, _ in self._held:
            future.set_exception(problem)
        self._held.clear()
