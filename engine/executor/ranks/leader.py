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
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.util import Finalize
from pathlib import Path
from signal import Signals
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from engine.attention.backend import Backend
from engine.executor.batch import Batch
from engine.models.sharding import Shard
from ssd.errors import UserError

TIMEOUT_S = 60.0
"""Longest time that a rank waits for another one within a step; far above the time of a step."""
NOTICE_S = 5.0
"""Time between the end of a rank and the end of rank 0's process if no step raises in the meantime; it is also the time
that a failed step waits for the reason."""
STOP_TIMEOUT_S = 5.0
"""Time after which a rank that was told to stop is killed."""


class RankSettings(NamedTuple):
    """What a rank needs to load its part of a model."""

    folder: Path
    shard: Shard
    dtype: torch.dtype
    device: str
    threads: int
    """Number of CPU threads."""


class Joining(NamedTuple):
    """Join the group; all ranks have loaded their parts."""

    store: Path


class Cache(NamedTuple):
    """Allocate a KV cache in place of the one before."""

    backend: Backend
    pages: int
    page_size: int


class Step(NamedTuple):
    """Run the forward pass of a batch."""

    batch: Batch
    layers: tuple[int, ...]
    """As in `Decoder.hidden_states`."""


class Move(NamedTuple):
    """Copy keys and values between slots, see `Attention.move`."""

    sources: np.ndarray
    targets: np.ndarray


class Stop(NamedTuple):
    """End the process."""


Message = Joining | Cache | Step | Move | Stop


class Loaded(NamedTuple):
    """Answer of a rank that has loaded its part."""


class LoadFailed(NamedTuple):
    """Answer of a rank that cannot load its part."""

    reason: str


class RankGroup:
    """Collective operations of `torch.distributed`: NCCL between GPUs, gloo between processes on a CPU.

    A process can belong to one group at a time.
    """

    def __init__(self, shard: Shard, store: Path, device: str) -> None:
        """Wait until all ranks have joined. store: a file that they share, so that no port has to be agreed on.

        Raises RuntimeError if a rank does not join within `TIMEOUT_S`.
        """
        self.shard = shard
        if sys.platform == "linux":
            # All ranks are on one machine, whose host name need not have an address.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        self._is_cuda = torch.device(device).type == "cuda"
        dist.init_process_group(
            "nccl" if self._is_cuda else "gloo",
            init_method=store.absolute().as_uri(),
            rank=shard.rank,
            world_size=shard.count,
            timeout=timedelta(seconds=TIMEOUT_S),
        )
        dist.barrier()  # Until here ranks may still read the file.

    def sum(self, tensor: Tensor) -> Tensor:
        """See `engine.models.sharding.Group`."""
        if self._is_cuda or self.shard.count == 2:
            dist.all_reduce(tensor)
            return tensor
        # gloo's all-reduce of more ranks adds each part of a tensor in another order.
        parts = [torch.empty_like(tensor) for _ in range(self.shard.count)]
        dist.all_gather(parts, tensor.contiguous())
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total

    def gather(self, tensor: Tensor) -> list[Tensor]:
        """See `engine.models.sharding.Group`."""
        is_first = self.shard.rank == 0
        parts = [torch.empty_like(tensor) for _ in range(self.shard.count)] if is_first else []
        dist.gather(tensor.contiguous(), parts or None)
        return parts

    def close(self) -> None:
        """Leave the group. Ranks that wait for this one get a RuntimeError."""
        dist.destroy_process_group()


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
