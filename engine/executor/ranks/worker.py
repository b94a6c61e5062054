"""The process of a rank other than 0: loads its part of the model and runs the steps that rank 0 sends."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, NoReturn

from engine.executor.ranks.leader import Cache, Joining, Loaded, LoadFailed, Move, RankSettings, Step, Stop
from ssd.errors import UserError

if TYPE_CHECKING:
    from engine.executor.runner import Runner
    from engine.models.sharding import ShardedDecoder


def run_rank(connection: Connection, settings: RankSettings) -> None:
    """Run the process of a rank until rank 0 tells it to stop, or a rank is lost."""
    # Signals such as Ctrl-C reach the whole process group; rank 0 decides when this process ends.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    name = f"rank {settings.shard.rank} of {settings.shard.count}"
    try:
        _serve(connection, settings)
    except (EOFError, ConnectionError):
        _fail(f"{name}: rank 0 has ended")
    except Exception as problem:
        if not _is_stopping(connection):
            [reason, *_] = str(problem).splitlines() or [""]
            if "gloo" in reason or type(problem).__name__.startswith("Dist"):  # exceptions of `torch.distributed`
                _fail(f"{name} has lost another rank: {reason.rpartition('] ')[2]}")
            _fail(f"{name} cannot continue: {type(problem).__name__}: {reason}")
    os._exit(0)  # Freeing PyTorch's modules one by one would take seconds.


def _serve(connection: Connection, settings: RankSettings) -> None:
    import torch

    from engine.executor.ranks.leader import RankGroup
    from engine.models.loader import load_config
    from engine.models.packed import pack
    from engine.models.sharding import load_shard

    torch.set_num_threads(settings.threads)
    if torch.device(settings.device).type == "cuda":
        torch.cuda.set_device(settings.device)
    try:
        model = load_shard(settings.folder, settings.shard, dtype=settings.dtype, device=settings.device)
        pack(model)
    except UserError as problem:
        connection.send(LoadFailed(str(problem)))
        return
    connection.send(Loaded())
    joining = connection.recv()
    if isinstance(joining, Stop):
        return
    assert isinstance(joining, Joining)
    group = RankGroup(settings.shard, joining.store, settings.device)
    model.connect(load_config(settings.folder), group)
    _run(connection, model)
    group.close()


def _run(connection: Connection, model: ShardedDecoder) -> None:
    """Run messages until `Stop`."""
    from engine.executor.runner import open_runner

    runner: Runner | None = None
    while not isinstance(message := connection.recv(), Stop):
        if isinstance(message, Cache):
            runner = None  # frees its memory first
            runner = open_runner(model, message)
            continue
        assert runner is not None
        if isinstance(message, Step):
            runner.forward_with_states(message.batch, message.layers)
        else:
            assert isinstance(message, Move)
            runner.move(message.sources, message.targets)


def _is_stopping(connection: Connection) -> bool:
    """Return whether rank 0 has told this one to stop in the meantime."""
    with suppress(EOFError, OSError):
        while connection.poll():
            if isinstance(connection.recv(), Stop):
                return True
    return False


def _fail(reason: str) -> NoReturn:
    # One write, so that lines of several ranks do not mix.
    os.write(sys.stderr.fileno(), f"error: {reason}\n".encode())
    os._exit(1)  # Closes the connections to other ranks at once, so that they notice.
