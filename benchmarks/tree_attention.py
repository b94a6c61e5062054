"""What attention of a draft tree costs against a path of as many tokens, on a GPU, for each way of computing it.

    python -m benchmarks.tree_attention [--contexts 2048 8192 32768] [--nodes 32] [--sequences 1]

One layer of the llama3-8b shape in bfloat16, times by CUDA events. `prepare_us` is what the CPU does once a step.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence

import numpy as np
import torch

from benchmarks.gpu.stepping import binary_tree, path
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kernels import Kernels
from engine.executor.batch import Batch, build_batch
from engine.models.config import ModelConfig
from engine.scheduling.plan import SequencePlan
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence as Running
from engine.speculation.draft_tree import DraftTree, straight_length

PAGE_SIZE = 16
ROUNDS = 50
SHAPE = ModelConfig(1, 4096, 14336, num_layers=1, num_heads=32, num_kv_heads=8, head_dim=128, max_positions=1 << 20)
WAYS: dict[str, tuple[Callable[[int], np.ndarray], Kernels]] = {
    "path, fa2": (path, Kernels()),
    "path, xqa": (path, Kernels(paths="xqa")),
    "tree, merged": (binary_tree, Kernels(trees="merge")),
    "tree, merged in PyTorch": (binary_tree, Kernels(trees="padded")),
    "tree, mask over everything": (binary_tree, Kernels(trees="mask")),
    "tree, xqa": (binary_tree, Kernels(trees="xqa")),
}
"""The draft's shape, and the kernels."""


def draft_batch(context: int, parents: np.ndarray, sequences: int = 1, page_size: int = PAGE_SIZE) -> Batch:
    """A step that verifies a draft behind `context` cached tokens, in each sequence on pages of its own.

    parents: int32 [nodes], of the draft's tokens, as in `DraftBatch`.
    """
    nodes = len(parents)
    count = pages_for(context, nodes, page_size)
    running = []
    for index in range(sequences):
        sequence = Running(index, Request(np.zeros(context + 1, np.uint32)), context + 1 + nodes)
        sequence.pages = list(range(index * count, (index + 1) * count))
        tree = None if straight_length(parents) == nodes else DraftTree(parents)
        running.append(SequencePlan(sequence, context, 1, produces=True, draft=np.zeros(nodes, np.uint32), tree=tree))
    return build_batch(running, page_size)


def pages_for(context: int, nodes: int, page_size: int = PAGE_SIZE) -> int:
    """Pages that a sequence needs in such a step."""
    return -(-(context + 1 + nodes) // page_size)


def measure(batch: Batch, kernels: Kernels, pages: int) -> dict[str, float]:
    """Median microseconds: on the GPU of one layer, and on the CPU of what is done once a step."""
    attention = FlashInferAttention(SHAPE, pages, PAGE_SIZE, torch.bfloat16, "cuda", kernels=kernels)
    heads = torch.randn(len(batch.tokens), 48, 128, device="cuda", dtype=torch.bfloat16)
    query, key, value = heads.split((32, 8, 8), dim=1)
    prepared, ran = [], []
    for _ in range(ROUNDS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        attend = attention.begin(batch)
        prepared.append((time.perf_counter() - began) * 1e6)
        ran.append(_gpu_us(lambda attend=attend: attend(0, query, key, value)))  # type: ignore[misc]
    return {"layer_us": round(statistics.median(ran), 1), "prepare_us": round(statistics.median(prepared), 1)}


def _gpu_us(run: Callable[[], object]) -> float:
    """Of one run. Work is queued before it, so that the CPU's launches are ahead of it."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(1_000_000)
    start.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) * 1e3


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure every way at every context."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--contexts", type=int, nargs="+", default=[2048, 8192, 32768])
    parser.add_argument("--nodes", type=int, default=32)
    parser.add_argument("--sequences", type=int, default=1)
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("a CUDA device is needed; there is none here")
    results = []
    for context in options.contexts:
        pages = options.sequences * pages_for(context, options.nodes)
        for name, (shape, kernels) in WAYS.items():
            batch = draft_batch(context, shape(options.nodes), options.sequences)
            results.append({"context": context, "way": name, **measure(batch, kernels, pages)})
            print(results[-1], flush=True)
    print(json.dumps({"gpu": torch.cuda.get_device_name(), "settings": vars(options), "results": results}))


if __name__ == "__main__":
    main()
