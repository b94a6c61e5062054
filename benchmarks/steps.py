"""Measure the time of an engine step by its number of tokens, with plain and with packed weights.

    python -m benchmarks.steps [--model FOLDER] [--context 300]

A step of n tokens of one sequence verifies n - 1 draft tokens. The two kinds of weights alternate.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from engine.models.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
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


def main() -> None:
    """Measure both kinds of weights for every number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache")
    arguments = parser.parse_args()
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
