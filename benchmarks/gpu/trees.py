"""Part about trees: what branches cost behind a long context, in a whole step and in attention alone."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from statistics import median

import numpy as np
import torch

from benchmarks.gpu.bench import Bench
from benchmarks.gpu.figures import Figure, at_least, at_most
from benchmarks.gpu.stepping import FixedDrafter, binary_tree, path, ratios, time_steps
from engine.attention.base import Attention
from engine.attention.plain import PlainAttention
from engine.batch import Batch, build_batch
from engine.config import EngineConfig
from engine.request import Request
from engine.sequence import Sequence
from engine.tree import DraftTree

NODES = 32
GPU_ATTENTION = "engine.attention.flashinfer"
OWN, CUSTOM_MASK = "FlashInferAttention", "CustomMaskAttention"
"""Classes looked up there; they are made like `PlainAttention`."""


def trees(bench: Bench) -> Iterator[Figure]:
    """Drafts of 32 tokens, none of which fits: a tree against a path, and against FlashInfer's custom mask."""
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
    """All layers' attention of one step, laying out included: tree by path, and custom mask by tree."""
    own = backend(bench, OWN) or PlainAttention
    seconds = {
        "path": attention_seconds(bench, own, path(NODES)),
        "tree": attention_seconds(bench, own, binary_tree(NODES)),
    }
    masked = backend(bench, CUSTOM_MASK)
    if masked is not None:
        seconds["custom mask"] = attention_seconds(bench, masked, binary_tree(NODES))
    details = {f"{name.replace(' ', '_')}_ms": round(1e3 * taken, 3) for name, taken in seconds.items()}
    details["backend"] = own.__name__
    tries = bench.scale.steps
    yield Figure("attention to a tree, by a path's", seconds["tree"] / seconds["path"], "x", tries, None, details)
    if masked is not None:
        ratio = seconds["custom mask"] / seconds["tree"]
        yield Figure("attention through the custom mask, by a tree's", ratio, "x", tries, at_least(1.0), details)


def backend(bench: Bench, name: str) -> type[Attention] | None:
    """A class of the GPU's attention, if this is a GPU and there is one."""
    if not bench.on_gpu:
        return None
    try:
        return getattr(import_module(GPU_ATTENTION), name, None)
    except ImportError:
        return None


def attention_seconds(bench: Bench, kind: type[Attention], parents: np.ndarray) -> float:
    """Median time of a draft of this shape behind the long context, of random keys for want of a prompt."""
    shape, page_size = bench.config, EngineConfig().page_size
    batch = draft_batch(bench.scale.long_context, parents, page_size)
    pages = -(-(bench.scale.long_context + 1 + len(parents)) // page_size)
    attention = kind(shape, pages, page_size, bench.dtype, bench.setting.device)
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


def draft_batch(context: int, parents: np.ndarray, page_size: int) -> Batch:
    """One sequence that verifies a draft of this shape behind `context` computed tokens."""
    sequence = Sequence(0, Request(np.ones(context + 1, np.uint32)), context + 1 + len(parents))
    sequence.pages = list(range(-(-(context + 1 + len(parents)) // page_size)))
    sequence.computed, sequence.scheduled = context, 1
    sequence.draft = np.arange(1, len(parents) + 1, dtype=np.uint32)
    if not np.array_equal(parents, path(len(parents))):
        sequence.tree = DraftTree(parents)
    return build_batch([sequence], page_size)
