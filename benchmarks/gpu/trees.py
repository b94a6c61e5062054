"""Part about trees: what branches cost behind a long context, in a whole step and in attention alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure, at_least, at_most
from benchmarks.gpu.stepping import FixedDrafter, binary_tree, path, ratios, time_steps
from benchmarks.tree_attention import draft_batch, pages_for
from engine.attention.backend import choose_backend, make_attention
from engine.attention.base import Attention
from engine.attention.flashinfer import FlashInferAttention
from engine.attention.kernels import Kernels
from engine.config import EngineConfig
from engine.models.config import ModelConfig

NODES = 32
Make = Callable[[ModelConfig, int, int, torch.dtype, str], Attention]


def trees(bench: Bench) -> Iterator[Figure]:
    """Drafts of 32 tokens, none of which fits: a tree against a path, and against FlashInfer's mask over everything."""
    yield whole_step(bench)
    yield from attention_alone(bench)


def whole_step(bench: Bench) -> Figure:
    """Steps with a tree by steps with a path, in turns."""
    shapes = {"path": path(NODES), "tree": binary_tree(NODES)}
    drafters = {name: FixedDrafter(parents, bench.config.vocab_size) for name, parents in shapes.items()}
    timed = time_steps(bench, drafters, 1, bench.scale.long_context, max_draft=NODES, shape="tree")
    ratio = median(ratios(timed["tree"], timed["path"]))
    details = {f"{name}_ms": round(1e3 * median(own.medians), 3) for name, own in timed.items()}
    name = f"a step with a tree of {NODES} nodes at {bench.scale.long_context} tokens, by one with a path of {NODES}"
    return Figure(name, ratio, "x", bench.scale.rounds, at_most(1.05), details)


def attention_alone(bench: Bench) -> Iterator[Figure]:
    """All layers' attention of one step, laying out included: tree by path, and a mask over everything by tree."""
    backend = choose_backend(bench.setting.attention, bench.config, bench.dtype, bench.setting.device)
    ways: dict[str, tuple[np.ndarray, Make]] = {
        "path": (path(NODES), partial(make_attention, backend)),
        "tree": (binary_tree(NODES), partial(make_attention, backend)),
    }
    if backend == "flashinfer":
        ways["mask"] = binary_tree(NODES), partial(FlashInferAttention, kernels=Kernels(trees="mask"))
    seconds = {name: attention_seconds(bench, make, parents) for name, (parents, make) in ways.items()}
    details: dict[str, object] = {f"{name}_ms": round(1e3 * taken, 3) for name, taken in seconds.items()}
    details["backend"] = backend
    tries = bench.scale.steps
    yield Figure("attention to a tree, by a path's", seconds["tree"] / seconds["path"], "x", tries, None, details)
    if "mask" in seconds:
        ratio = seconds["mask"] / seconds["tree"]
        yield Figure("attention through a mask over everything, by a tree's", ratio, "x", tries, at_least(1.0), details)


def attention_seconds(bench: Bench, make: Make, parents: np.ndarray) -> float:
    """Median time of a draft of this shape behind the long context, of random keys for want of a prompt."""
    shape, page_size, context = bench.config, EngineConfig().page_size, bench.scale.long_context
    batch = draft_batch(context, parents, page_size=page_size)
    pages = pages_for(context, len(parents), page_size)
    attention = make(shape, pages, page_size, bench.dtype, bench.setting.device)
    tokens = len(batch.tokens)
    heads = (shape.num_heads, shape.num_kv_heads, shape.num_kv_heads)
    query, key, value = (
        torch.randn(tokens, count, shape.head_dim, dtype=bench.dtype, device=bench.setting.device) for count in heads
    )

    def run() -> None:
        attend = attention.begin(batch)
        for layer in range(shape.num_layers):
            attend(layer, query, key, value)

    with torch.inference_mode():
        return bench.seconds(run, bench.scale.steps)
