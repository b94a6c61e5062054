"""Compare the time that a sidecar adds to a step between commits: `python -m benchmarks.round_trip --against FOLDER`.

FOLDER holds another commit of this repository, such as a worktree. Both services and both engines run at the same time,
and short blocks of steps alternate between the commits and between remote and embedded drafting, so that other load
affects all of them alike. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

BATCHES = (1, 64)
BLOCK_STEPS = 25
WARM_UP_STEPS = 50
HERE = Path(__file__).resolve()
NAMES = ("remote", "embedded")


class Contestant:
    """A process that runs the steps of one commit."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        self.blocks: dict[int, dict[str, list[dict[str, float]]]] = {
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

    def added(self, batch: int, what: str) -> float:
        """Return the median additional time of a step through the sidecar over an embedded one, in us."""
        pairs = zip(self.blocks[batch]["remote"], self.blocks[batch]["embedded"], strict=True)
        return round(statistics.median(remote[what] - embedded[what] for remote, embedded in pairs), 1)


@contextmanager
def contestant(folder: Path, tokens: int) -> Iterator[Contestant]:
    """Start the process of a commit."""
    command = [sys.executable, str(HERE), "--run", "--tokens", str(tokens)]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    with subprocess.Popen(
        command, cwd=folder, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        yield Contestant(process)
        assert process.stdin is not None
        process.stdin.close()


def compare(against: Path, tokens: int, rounds: int) -> dict[str, Any]:
    """Return the added microseconds of both commits, and their ratios."""
    with ExitStack() as stack:
        contestants = {
            name: stack.enter_context(contestant(folder, tokens))
            for name, folder in (("this", HERE.parent.parent), ("other", against.resolve()))
        }
        for each in contestants.values():
            assert each.answer() == "ready"
        for batch in BATCHES:
            for number in range(rounds):
                for each in list(contestants.values())[:: 1 if number % 2 else -1]:
                    for name in NAMES:
                        each.run(batch, name)
    result: dict[str, Any] = {}
    for batch in BATCHES:
        for what in ("step_us", "engine_cpu_us", "service_cpu_us"):
            added = {name: each.added(batch, what) for name, each in contestants.items()}
            ratio = round(added["this"] / added["other"], 3)
            result[f"added_{what}_batch{batch}"] = {**added, "ratio": ratio}
    return result


def run(tokens: int) -> None:
    """Run the blocks of steps that standard input asks for."""
    import ssd
    from benchmarks.sidecar import LONG_DEADLINE_S, client_of, engine_on, fill, service
    from benchmarks.text import Writer
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
            engines[batch, "remote"] = engine_on(client, batch)
            engines[batch, "embedded"] = engine_on(ssd.SuffixDrafter(config, corpus=corpus), batch)
            for name in NAMES:
                for _ in range(WARM_UP_STEPS):
                    engines[batch, name].step()
        service_task = _service_task()
        print(json.dumps("ready"), flush=True)
        for line in sys.stdin:
            batch, name = json.loads(line)
            print(json.dumps(_block(engines[batch, name], service_task)), flush=True)
        for client in clients:
            client.close()
    corpus.close()


def _block(engine: Any, service_task: Path) -> dict[str, float]:
    """Run a block; return the median duration of a step and the mean processor time of both sides, in us."""
    used, own = _used_us(service_task), time.thread_time()
    durations = [engine.step() for _ in range(BLOCK_STEPS)]
    return {
        "step_us": statistics.median(durations) * 1e6,
        "engine_cpu_us": (time.thread_time() - own) / BLOCK_STEPS * 1e6,
        "service_cpu_us": (_used_us(service_task) - used) / BLOCK_STEPS,
    }


def _service_task() -> Path:
    """Return the folder with the counters of the service's event loop, a child of this process."""
    (child,) = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return Path(f"/proc/{child}/task/{child}")


def _used_us(task: Path) -> float:
    return int((task / "schedstat").read_text().split()[0]) / 1e3


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", type=Path, help="folder with another commit")
    parser.add_argument("--tokens", type=int, default=200_000)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--run", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.run:
        run(arguments.tokens)
    else:
        print(json.dumps(compare(arguments.against, arguments.tokens, arguments.rounds)))


if __name__ == "__main__":
    main()
