"""Compare the time that a sidecar adds to a step between commits: `python -m benchmarks.round_trip --against FOLDER`.

FOLDER holds another commit of this repository, such as a worktree. Both services and both engines run at the same time,
and short blocks of steps alternate between the commits and between remote and embedded drafting, so that other load
affects all of them alike. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

BATCHES = (1, 64)
BLOCK_STEPS = 25
WARM_UP_STEPS = 50
PERCENTILES = (10, 25, 50)
"""Other load hardly affects the low percentiles."""
HERE = Path(__file__).resolve()
NAMES = ("remote", "embedded")


class StepProcess:
    """A process that runs the steps of one commit."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.blocks: dict[int, dict[str, list[dict[str, list[float]]]]] = {
            batch: {name: [] for name in NAMES} for batch in BATCHES
        }

    def run(self, batch: int, name: str) -> None:
        """Run a block of steps."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([batch, name]) + "\n")
        self._process.stdin.flush()
        self.blocks[batch][name].append(self.answer())

    def answer(self) -> Any:
        """Return the process's next output."""
        assert self._process.stdout is not None
        return json.loads(self._process.stdout.readline())

    def percentiles(self, batch: int, name: str, what: str) -> np.ndarray:
        """Return the `PERCENTILES` of what each step took, in microseconds."""
        steps = np.array([block[what] for block in self.blocks[batch][name]])
        return np.percentile(steps * 1e6, PERCENTILES)


@contextmanager
def step_process(folder: Path, tokens: int) -> Iterator[StepProcess]:
    """Start the process of a commit."""
    command = [sys.executable, str(HERE), "--run", "--tokens", str(tokens)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield StepProcess(process)
        assert process.stdin is not None
        process.stdin.close()


def compare(against: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the added microseconds of both commits, and their ratios."""
    with ExitStack() as stack:
        processes = {
            name: stack.enter_context(step_process(folder, tokens))
            for name, folder in (("this", HERE.parent.parent), ("other", against.resolve()))
        }
        for each in processes.values():
            assert each.answer() == "ready"
        for batch in BATCHES:
            for number in range(rounds):
                for each in list(processes.values())[:: 1 if number % 2 else -1]:
                    for name in NAMES:
                        each.run(batch, name)
    result: dict[str, Any] = {}
    for batch in BATCHES:
        added, cpu = {}, {}
        for name, each in processes.items():
            embedded = each.percentiles(batch, "embedded", "step_s")
            added[name] = each.percentiles(batch, "remote", "step_s") - embedded
            cpu[name] = each.percentiles(batch, "remote", "engine_cpu_s")
        result |= {f"added_us_batch{batch}": _compared(added), f"client_cpu_us_batch{batch}": _compared(cpu)}
    return result


def _compared(figures: dict[str, np.ndarray]) -> dict[str, dict[str, float]]:
    """Return the figures of both commits and their ratios, by percentile."""
    rows = {**figures, "ratio": figures["this"] / figures["other"]}
    return {
        name: {f"p{share}": round(float(value), 3) for share, value in zip(PERCENTILES, row, strict=True)}
        for name, row in rows.items()
    }


def run(tokens: int) -> None:
    """Run the blocks of steps that standard input asks for."""
    import ssd

    # Other commits have `Writer` in another module.
    from benchmarks.sidecar import LONG_DEADLINE_S, Writer, client_of, engine_on, fill, service
    from ssd.config import DrafterConfig

    corpus = ssd.Corpus(tokens)
    for text in Writer(1).take(tokens):
        corpus.append(text)
    corpus.refresh()
    while corpus.is_merging:
        corpus.refresh()
    corpus.maintain(DrafterConfig().refresh_interval_s)
    config = DrafterConfig(capacity=tokens)
    with tempfile.TemporaryDirectory() as folder, service(Path(folder), "--capacity", str(tokens)) as address:
        fill(address, tokens)
        clients = [client_of(address, deadline_s=LONG_DEADLINE_S) for _ in BATCHES]
        engines = {}
        for batch, client in zip(BATCHES, clients, strict=True):
            for name, drafter in (("remote", client), ("embedded", ssd.SuffixDrafter(config, corpus=corpus))):
                timed = Timed(drafter)
                engines[batch, name] = engine_on(timed, batch), timed
                for _ in range(WARM_UP_STEPS):
                    engines[batch, name][0].step()
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            batch, name = json.loads(line)
            print(json.dumps(_block(*engines[batch, name])), flush=True)
        for client in clients:
            client.close()
    corpus.close()


class Timed:
    """A drafter that records the processor time of its calling thread while it drafts."""

    def __init__(self, drafter: Any) -> None:
        self._drafter = drafter
        self.cpu_s: list[float] = []
        self.start, self.finish = drafter.start, drafter.finish

    def draft(self, progress: Any) -> Any:
        """Draft for a batch."""
        began = time.thread_time()
        drafts = self._drafter.draft(progress)
        self.cpu_s.append(time.thread_time() - began)
        return drafts


def _block(engine: Any, timed: Timed) -> dict[str, list[float]]:
    """Run a block; return the duration of each step's draft, and the processor time of the engine's thread in it."""
    steps, cpu = [], []
    for _ in range(BLOCK_STEPS):
        first = len(timed.cpu_s)
        steps.append(engine.step())
        cpu.append(timed.cpu_s[first])
    return {"step_s": steps, "engine_cpu_s": cpu}


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, metavar="FOLDER", help="folder with the commit to compare with")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.tokens)
    elif arguments.against is None:
        parser.error("--against is required: the folder with the commit to compare with")
    else:
        print(json.dumps(compare(arguments.against, arguments.tokens, arguments.rounds)))


if __name__ == "__main__":
    main()
