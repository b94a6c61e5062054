"""Speed of batches whose requests use several LoRA adapters, compared with one adapter and with none.

    python -m benchmarks.adapters [--model FOLDER] [--adapters 0,1,8] [--rank 8] [--sequences 16] [--rounds 15]

Each engine has the given number of adapters on all linear layers, with random weights, and the requests of a batch use
them in turn. The engines run the same prompts alternately, in reversed order every second round, without drafts and
prefix cache. Figures are medians over the rounds; `ratio` is the speed relative to one adapter in the same round, by
time and by CPU time. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from benchmarks.replay import list_of
from engine.models.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from engine.engine import Engine

PROMPT_TOKENS = 32
OUTPUT_TOKENS = 64


class Speed(NamedTuple):
    """Output tokens per second of one run."""

    wall: float
    cpu: float
    """Per second of CPU time."""


def make_engine(folder: Path, adapters: int, rank: int, sequences: int) -> Engine:
    """Return an engine with random adapters in memory, named 0, 1, ..."""
    # PyTorch takes seconds to import; --help does not need it.
    import torch

    from engine.config import EngineConfig
    from engine.drafters.model_free.none import NoDrafter
    from engine.engine import build_engine
    from engine.models.loader import load_model
    from engine.models.lora.format import Adapter, AdapterModule, Update, adapter_places
    from engine.models.lora.pool import AdapterPool
    from engine.models.packed import pack

    class RandomAdapter(Adapter):
        def read(self) -> dict[str, Update]:
            return {
                name: Update(0.01 * torch.randn(place.inputs, rank), 0.01 * torch.randn(rank, place.rows))
                for name, (place, rank, _) in self.modules.items()
            }

    model = load_model(folder)
    places = adapter_places(model)
    modules = {name: AdapterModule(place, rank, 1.0) for name, place in places.items()}
    pack(model)
    config = EngineConfig(max_sequences=sequences, prefix_cache=False, max_draft=0)
    if not adapters:
        return build_engine(model, config, NoDrafter())
    names = [str(number) for number in range(adapters)]
    pool = AdapterPool(model, {name: RandomAdapter(name, folder, modules, places) for name in names}, adapters)
    return build_engine(model, config, NoDrafter(), adapters=pool)


def run(engine: Engine, adapters: int, sequences: int) -> Speed:
    """Run one batch and return its speed."""
    from engine.scheduling.request import Request, SamplingParams

    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
    prompts = np.random.default_rng(0).integers(1, 256, (sequences, PROMPT_TOKENS)).astype(np.uint32)
    names = [str(index % adapters) if adapters else None for index in range(sequences)]
    requests = [Request(prompt, sampling, adapter=name) for prompt, name in zip(prompts, names, strict=True)]
    wall, cpu = time.perf_counter(), time.process_time()
    completions = engine.generate(requests)
    tokens = sum(len(completion.tokens) for completion in completions)
    return Speed(tokens / (time.perf_counter() - wall), tokens / (time.process_time() - cpu))


def row_of(adapters: int, own: list[Speed], one: list[Speed]) -> dict[str, float]:
    """Return the figures of a number of adapters; one: the runs with one adapter in the same rounds."""
    pairs = list(zip(own, one, strict=True))
    return {
        "adapters": adapters,
        "tokens_per_s": round(median(speed.wall for speed in own), 1),
        "tokens_per_cpu_s": round(median(speed.cpu for speed in own), 1),
        "ratio": round(median(speed.wall / other.wall for speed, other in pairs), 3),
        "cpu_ratio": round(median(speed.cpu / other.cpu for speed, other in pairs), 3),
    }


def main() -> None:
    """Run all engines alternately and print their speeds."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.adapters", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--adapters", type=list_of(int), default=[0, 1, 8], help="numbers of adapters (0,1,8)")
    parser.add_argument("--rank", type=int, default=8, help="8")
    parser.add_argument("--sequences", type=int, default=16, help="16")
    parser.add_argument("--rounds", type=int, default=15, help="15")
    arguments = parser.parse_args()
    sequences = arguments.sequences
    counts: list[int] = list(dict.fromkeys([*arguments.adapters, 1]))
    engines = {count: make_engine(arguments.model, count, arguments.rank, sequences) for count in counts}
    speeds: dict[int, list[Speed]] = {count: [] for count in counts}
    for number in range(arguments.rounds + 1):
        for count in counts if number % 2 else counts[::-1]:
            speed = run(engines[count], count, sequences)
            if number:  # the first round reads adapters and compiles kernels
                speeds[count].append(speed)
    rows = [row_of(count, own, speeds[1]) for count, own in speeds.items()]
    for row in rows:
        print(row)
    for engine in engines.values():
        engine.close()
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(arguments).items()}
    print(json.dumps({"results": rows, "settings": settings}))


if __name__ == "__main__":
    main()
