"""Rank 0's side of tensor parallelism: starts the processes of the other ranks, sends them steps, and watches them.

If a rank ends, rank 0 usually notices within a step, because its exchange with that rank fails; the step then raises
UserError. Otherwise (no step runs, or a GPU waits for another one without end) a thread ends the process. The other
ranks end when they lose rank 0.
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from signal import Signals
from typing import Any

from torch import Tensor

from engine.executor.ranks.group import TIMEOUT_S, RankGroup
from engine.executor.ranks.messages import Joining, LoadFailed, Message, RankSettings, Stop
from engine.models.division import Shard
from ssd.errors import UserError

NOTICE_S = 5.0
"""Time between the end of a rank and the end of rank 0's process if no step raises in the meantime; it is also the time
that a failed step waits for the reason."""
STOP_TIMEOUT_S = 5.0
"""Time after which a rank that was told to stop is killed."""


class Ranks:
    """The group of all ranks, and the processes of all but rank 0, which is this process."""

    def __init__(self, settings: Sequence[RankSettings], run: Callable[[Connection, RankSettings], None]) -> None:
        """Start a process that calls `run` for each of `settings`, of ranks 1, 2, ...; they load their parts."""
        self.shard = Shard(0, len(settings) + 1)
        self._group: RankGroup | None = None
        self._lost: str | None = None
        self._has_noticed = threading.Event()
        self._is_handled = threading.Event()
        self._is_closing = False
        context = multiprocessing.get_context("spawn")
        self.processes: list[Any] = []
        self._connections: list[Connection] = []
        # Unlike `atexit`, this runs in child processes too, before they wait for their own children.
        self.close = Finalize(None, self._close, exitpriority=10)
        for each in settings:
            here, there = context.Pipe()
            process = context.Process(target=run, args=(there, each), name=f"ssd-rank-{each.shard.rank}")
            process.start()
            there.close()
            self.processes.append(process)
            self._connections.append(here)
        threading.Thread(target=self._watch, name="rank-watcher", daemon=True).start()

    def join(self, device: str) -> None:
        """Wait until all ranks have loaded their parts, then connect them. Raises UserError if one of them fails."""
        with self.reporting():
            for rank, connection in enumerate(self._connections, start=1):
                answer = connection.recv()
                if isinstance(answer, LoadFailed):
                    raise UserError(f"rank {rank} of {self.shard.count}: {answer.reason}")
            folder = Path(tempfile.mkdtemp(prefix="ssd-ranks-"))
            try:
                self.send(Joining(folder / "store"))
                self._group = RankGroup(self.shard, folder / "store", device)
            finally:
                shutil.rmtree(folder, ignore_errors=True)

    def send(self, message: Message) -> None:
        """Send a message to all other ranks. Raises OSError if one of them has ended."""
        data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
        for connection in self._connections:
            connection.send_bytes(data)

    def sum(self, tensor: Tensor) -> Tensor:
        """See `engine.models.sharding.Group`."""
        assert self._group is not None
        return self._group.sum(tensor)

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See `engine.models.sharding.Group`."""
        assert self._group is not None
        return self._group.gather(tensor)

    @contextmanager
    def reporting(self) -> Iterator[None]:
        """Convert an exception to a UserError if a rank has ended or does not answer."""
        try:
            yield
        except (RuntimeError, OSError, EOFError) as problem:
            if self._has_noticed.wait(NOTICE_S):
                self._is_handled.set()
                raise UserError(f"{self._lost}") from None
            if "timed out" in str(problem).lower():
                raise UserError(
                    f"the ranks of --tensor-parallel {self.shard.count} have not answered for {TIMEOUT_S:g} s; "
                    "start the engine again"
                ) from None
            raise

    def _watch(self) -> None:
        """Notice the first rank that ends, and end this process unless a step raises because of it."""
        ready = wait([process.sentinel for process in self.processes])
        if self._is_closing:
            return
        ended = [process for process in self.processes if process.sentinel in ready]
        for process in ended:
            process.join()
        # Ranks that lose another one end by themselves; the first to end was killed or failed.
        process = min(ended, key=lambda each: each.exitcode)
        rank, code = self.processes.index(process) + 1, process.exitcode
        how = f"was killed by {Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        self._lost = f"rank {rank} of {self.shard.count} {how}, and the engine cannot run without it; start it again"
        self._has_noticed.set()
        if not self._is_handled.wait(NOTICE_S) and not self._is_closing:
            print(f"error: {self._lost}", file=sys.stderr, flush=True)
            os._exit(1)

    def _close(self) -> None:
        """End the other ranks."""
        self._is_closing = True
        self._is_handled.set()
        with suppress(OSError):
            self.send(Stop())
        for connection in self._connections:
            connection.close()
        if self._group is not None:
            self._group.close()
        for process in self.processes:
            process.join(STOP_TIMEOUT_S)
            if process.is_alive():
                process.kill()
                process.join()
