"""Measure the time of an engine step by its number of tokens, with plain and with packed weights.

    python -m benchmarks.steps [--model FOLDER] [--context 300] [--ranks 2]

A step of n tokens of one sequence verifies n - 1 draft tokens. The two kinds of weights alternate.

With --ranks the model is divided over processes, and a step is split into rank 0's own work, the exchange of tensors,
and the message that starts the step on the other ranks: the time to send it, and the time by which the first sum takes
longer than a later one of the same size, because the other ranks receive the message.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.commands.openmp import limit_spinning
from engine.models.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from engine.executor.ranks.leader import Ranks
    from engine.executor.runner import Runner

STEP_TOKENS = (1, 2, 4, 8, 12, 16, 17, 24, 32, 64)
ROUNDS = 60
PAGE_SIZE = 16


def step_ms(runner: Runner, context: int, tokens: int) -> float:
    """Return the milliseconds of one step of `tokens` tokens after `context` cached ones."""
    from engine.executor.batch import build_batch
    from engine.scheduling.plan import SequencePlan
    from engine.scheduling.request import Request
    from engine.scheduling.sequence import Sequence

    prompt = np.ones(context + 1, np.uint32)
    sequence = Sequence(0, Request(prompt), context + 1 + tokens)
    sequence.pages = list(range(-(-(context + 1 + tokens) // PAGE_SIZE)))
    entry = SequencePlan(sequence, context, 1, produces=True, draft=np.arange(1, tokens, dtype=np.uint32))
    began = time.perf_counter()
    runner.forward(build_batch([entry], PAGE_SIZE)).argmax(-1)
    return (time.perf_counter() - began) * 1e3


def load_runners(folder: Path, pages: int) -> dict[str, Runner]:
    """Return a model with a KV cache of `pages` pages for each kind of weights."""
    # PyTorch takes seconds to import; --help does not need it.
    import torch

    from engine.attention.plain import PlainAttention
    from engine.executor.runner import Runner
    from engine.models.loader import load_model
    from engine.models.packed import pack

    runners = {}
    for name in ("plain", "packed"):
        model = load_model(folder)
        if name == "packed":
            pack(model)
        runners[name] = Runner(model, PlainAttention(model.config, pages, PAGE_SIZE, torch.float32, "cpu"))
    return runners


class StepParts:
    """Durations within the current step of a divided model, in milliseconds."""

    def __init__(self, ranks: Ranks) -> None:
        """Time the methods of rank 0's group."""
        self.sends: list[float] = []
        self.sums: list[float] = []
        self.gathers: list[float] = []
        for name, times in (("send", self.sends), ("sum", self.sums), ("gather", self.gathers)):
            setattr(ranks, name, self._timed(getattr(ranks, name), times))

    def take(self) -> dict[str, float]:
        """Return the durations of the message and of the exchange of tensors, and forget them."""
        waited = max(0.0, self.sums[0] - float(np.median(self.sums[1:])))
        parts = {"message": sum(self.sends) + waited, "exchange": sum(self.sums) + sum(self.gathers) - waited}
        for times in (self.sends, self.sums, self.gathers):
            times.clear()
        return parts

    @staticmethod
    def _timed(call: Callable[[Any], Any], times: list[float]) -> Callable[[Any], Any]:
        def timed(argument: Any) -> Any:
            began = time.perf_counter()
            result = call(argument)
            times.append((time.perf_counter() - began) * 1e3)
            return result

        return timed


def measure_ranks(folder: Path, context: int, count: int) -> list[dict[str, float]]:
    """Return median durations of steps of a model on `count` ranks, by the number of tokens of a step."""
    import torch

    from engine.executor.ranks.leader import Ranks
    from engine.executor.ranks.load import load_ranks
    from engine.executor.ranks.messages import Cache
    from engine.executor.ranks.runner import open_runner

    model = load_ranks(folder, count, dtype=torch.float32, device="cpu", threads=1)
    torch.set_num_threads(1)
    assert isinstance(model.group, Ranks)
    runner = open_runner(model, Cache("plain", context // PAGE_SIZE + 8, PAGE_SIZE))
    parts = StepParts(model.group)
    results = []
    for tokens in STEP_TOKENS:
        rounds = []
        for _ in range(ROUNDS):
            step = step_ms(runner, context, tokens)
            rounds.append({"step": step, **parts.take()})
        medians = {f"{name}_ms": round(float(np.median([each[name] for each in rounds])), 3) for name in rounds[0]}
        share = float(np.median([each["message"] / each["step"] for each in rounds]))
        results.append({"step_tokens": tokens, **medians, "message_share": round(share, 4)})
        print(results[-1], flush=True)
    model.group.close()
    return results


def main() -> None:
    """Measure steps for every number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache")
    parser.add_argument("--ranks", type=int, help="measure a model on this number of processes instead")
    arguments = parser.parse_args()
    limit_spinning(os.environ)
    if arguments.ranks:
        measured = measure_ranks(arguments.model, arguments.context, arguments.ranks)
        print(json.dumps({"model": arguments.model.name, "ranks": arguments.ranks, "results": measured}))
        return
    runners = load_runners(arguments.model, arguments.context // PAGE_SIZE + 8)
    results = []
    for tokens in STEP_TOKENS:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(ROUNDS):
            for name, runner in runners.items():
                times[name].append(step_ms(runner, arguments.context, tokens))
        medians = {name: round(float(np.median(values)), 3) for name, values in times.items()}
        results.append({"step_tokens": tokens, **{f"{name}_ms": value for name, value in medians.items()}})
        print(results[-1], flush=True)
    print(json.dumps({"model": arguments.model.name, "context": arguments.context, "results": results}))


if __name__ == "__main__":
    main()
