"""Measure what the engine adds to a draft position of a drafter that runs a network, besides the forward pass.

    python -m benchmarks.draft_overhead [--kind mtp,eagle3] [--batch 1,16] [--depth 4] [--temperature 0,0.8]

Counts the whole of `propose` and `observe` except the network and its attention: collecting inputs, preparing
attention, sampling, growing drafts, calibration. The kinds and batch sizes alternate; figures are medians over steps,
in milliseconds of processor time per draft position.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.commands.openmp import limit_spinning

if TYPE_CHECKING:
    from engine.drafters.base import Drafter
    from engine.models.decoder import Decoder

ROUNDS = 3
MAX_TOKENS = 96
SKIPPED_STEPS = 5
"""Steps at the start of each run that are not counted."""


@dataclass
class Stopwatch:
    """Time in a drafter, and the part of it in the network."""

    total_s: float = 0.0
    network_s: float = 0.0
    steps_ms: list[float] = field(default_factory=list)
    """Overhead of each step per draft position."""
    forward_ms: list[float] = field(default_factory=list)
    """Time of the network in each step per draft position."""

    def counted(self, call: Callable[..., Any], *, is_network: bool) -> Callable[..., Any]:
        """Return `call` with its time counted."""

        def timed(*arguments: Any, **options: Any) -> Any:
            began = time.thread_time()
            result = call(*arguments, **options)
            seconds = time.thread_time() - began
            if is_network:
                self.network_s += seconds
            else:
                self.total_s += seconds
            return result

        return timed

    def end_step(self, positions: int) -> None:
        """Record a step with a number of draft positions."""
        self.steps_ms.append((self.total_s - self.network_s) / positions * 1e3)
        self.forward_ms.append(self.network_s / positions * 1e3)
        self.total_s = self.network_s = 0.0


def instrument(drafter: Drafter, watch: Stopwatch) -> None:
    """Count the time of a drafter and of its network."""
    head = drafter.head  # type: ignore[attr-defined]
    head.forward = watch.counted(head.forward, is_network=True)
    head.logits = watch.counted(head.logits, is_network=True)
    head.target_states = watch.counted(head.target_states, is_network=True)
    drafter.propose = watch.counted(drafter.propose, is_network=False)  # type: ignore[method-assign]
    drafter.observe = watch.counted(drafter.observe, is_network=False)  # type: ignore[method-assign]


def measure(model: Decoder, kind: str, batch: int, depth: int, temperature: float, watch: Stopwatch) -> None:
    """Run one batch of requests."""
    from engine.config import EngineConfig
    from engine.drafters.base import TargetInfo
    from engine.drafters.registry import build_drafter
    from engine.engine import build_engine
    from engine.models.shipped import SHIPPED_MODEL
    from engine.scheduling.request import Request, SamplingParams
    from ssd.config import DrafterConfig

    config = EngineConfig(max_sequences=batch, max_draft=depth, draft_shape="path")
    settings = DrafterConfig(max_draft=depth, options={"depth": str(depth)}, draft_shape="path")
    drafter = build_drafter(kind, settings, TargetInfo.from_model(model, config, SHIPPED_MODEL))
    instrument(drafter, watch)  # type: ignore[arg-type]
    engine = build_engine(model, config, drafter)
    rng = np.random.default_rng(0)
    requests = [
        Request(
            rng.integers(0, model.config.vocab_size, 64).astype(np.uint32),
            SamplingParams(MAX_TOKENS, temperature, seed=seed, ignore_eos=True),
        )
        for seed in range(batch)
    ]
    steps = 0

    def on_step(_report: object) -> None:
        nonlocal steps
        steps += 1
        if steps <= SKIPPED_STEPS:
            watch.total_s = watch.network_s = 0.0
        else:
            watch.end_step(depth)

    engine.generate(requests, on_step)
    engine.close()


def main() -> None:
    """Measure all kinds and batch sizes in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kind", default="mtp,eagle3,draft-model", help="drafters")
    parser.add_argument("--batch", default="1,16", help="sequences at a time")
    parser.add_argument("--temperature", default="0,0.8")
    parser.add_argument("--depth", type=int, default=4, help="draft positions")
    arguments = parser.parse_args()
    limit_spinning(os.environ)
    from engine.models.loader import load_model
    from engine.models.packed import pack
    from engine.models.shipped import SHIPPED_MODEL

    model = pack(load_model(SHIPPED_MODEL))
    cases = {
        (kind, int(batch), float(temperature)): Stopwatch()
        for kind in arguments.kind.split(",")
        for batch in arguments.batch.split(",")
        for temperature in arguments.temperature.split(",")
    }
    for _ in range(ROUNDS):
        for (kind, batch, temperature), watch in cases.items():
            measure(model, kind, batch, arguments.depth, temperature, watch)
    results = [
        {
            "drafter": kind,
            "batch": batch,
            "temperature": temperature,
            "overhead_ms": round(float(np.median(watch.steps_ms)), 3),
            "forward_ms": round(float(np.median(watch.forward_ms)), 3),
            "steps": len(watch.steps_ms),
        }
        for (kind, batch, temperature), watch in cases.items()
    ]
    for result in results:
        print(result)
    print(json.dumps({"model": SHIPPED_MODEL.name, "depth": arguments.depth, "results": results}))


if __name__ == "__main__":
    main()
