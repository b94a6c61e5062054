"""An engine whose ranks end: one line on every rank, and no process that waits."""

import os
import signal
import subprocess
import sys

import pytest

from engine.commands.launch import launch, load
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request
from ssd.errors import UserError
from tests.engine.executor.ranks.test_ranks import PATTERN, options_of

TIMEOUT_S = 60
LEADER = """
import signal
import sys
from pathlib import Path
import torch
from engine.executor.ranks.load import load_ranks
if __name__ == "__main__":
    model = load_ranks(Path(sys.argv[1]), 2, dtype=torch.float32, device="cpu", threads=1)
    print(model.group.processes[0].pid, flush=True)
    signal.pause()
"""


def test_a_step_fails_with_one_line_if_a_rank_was_killed(model_folder, capfd):
    options = options_of(model_folder, 4)
    model = load(options)
    engine = launch(model, Tokenizer(options.folder), options, print, lambda _: None)
    engine.add(Request(PATTERN))
    engine.step()
    os.kill(model.group.processes[1].pid, signal.SIGKILL)

    def run():
        for _ in range(5):
            engine.step()

    with pytest.raises(UserError, match="rank 2 of 4 was killed by SIGKILL, and the engine cannot run without it"):
        run()
    model.group.close()
    assert not any(process.is_alive() for process in model.group.processes)
    printed = [line.split(":")[:2] for line in capfd.readouterr().err.splitlines()]
    # A rank that is told to stop before it notices prints nothing.
    expected = [["error", f" rank {rank} of 4 has lost another rank"] for rank in (1, 3)]
    assert all(line in expected for line in printed)
    assert len(printed) == len({line[1] for line in printed})


@pytest.mark.parametrize("rank", [0, 1])
def test_an_idle_engine_ends_with_one_line_if_a_rank_was_killed(tmp_path, model_folder, rank):
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    process = subprocess.Popen(
        [sys.executable, script, model_folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    other = int(process.stdout.readline())
    os.kill([process.pid, other][rank], signal.SIGKILL)
    _, printed = process.communicate(timeout=TIMEOUT_S)  # returns when both processes have closed stderr
    if rank == 0:
        assert printed == "error: rank 1 of 2: rank 0 has ended\n"
    else:
        assert printed.startswith("error: rank 1 of 2 was killed by SIGKILL")
        assert printed.count("\n") == 1
        assert process.returncode == 1
