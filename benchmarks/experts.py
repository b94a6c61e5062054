"""Measure a layer of experts by the number of tokens in a step, beside the grouped implementation of transformers.

    python -m benchmarks.experts [--experts 64] [--per-token 8] [--hidden 512] [--size 256]

Both run the same random weights in float32. `experts_used` is the number of experts that the step reads; `same_ms` is
the time of tokens that are all equal, which use the same few experts.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from engine.commands.openmp import limit_spinning

if TYPE_CHECKING:
    from torch import Tensor, nn

    from engine.models.experts import MixtureOfExperts

STEP_TOKENS = (1, 2, 4, 8, 16, 32, 64, 128)
ROUNDS = 40


def make_layers(hidden: int, count: int, per_token: int, size: int) -> tuple[MixtureOfExperts, nn.Module]:
    """Return a packed layer of this engine, and one of transformers with the same weights."""
    # PyTorch and transformers take seconds to import; --help does not need them.
    from transformers import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    from engine.models.config import ExpertsConfig
    from engine.models.experts import MixtureOfExperts
    from engine.models.packed import pack_linears

    ours = MixtureOfExperts(hidden, ExpertsConfig(count, per_token, size, (0,))).requires_grad_(False)
    shape = Qwen3MoeConfig(
        hidden_size=hidden,
        num_experts=count,
        num_experts_per_tok=per_token,
        moe_intermediate_size=size,
        norm_topk_prob=True,
        experts_implementation="grouped_mm",
    )
    theirs = Qwen3MoeSparseMoeBlock(shape).requires_grad_(False)
    theirs.gate.weight.copy_(ours.router.proj.weight)
    theirs.experts.gate_up_proj.copy_(ours.experts.gate_up_proj.weight)
    theirs.experts.down_proj.copy_(ours.experts.down_proj.weight)
    pack_linears(ours, ours.experts.down_proj.weight)
    return ours, theirs


def measure(ours: MixtureOfExperts, theirs: nn.Module, hidden: Tensor) -> dict[str, Any]:
    """Return the medians of both layers in ms for hidden states [N, hidden size]; the kinds of steps alternate."""
    from engine.models.ops import PLAIN

    same = hidden[:1].expand(len(hidden), -1).contiguous()
    runs: dict[str, Callable[[], Tensor]] = {
        "ours_ms": lambda: ours(hidden, PLAIN),
        "transformers_ms": lambda: theirs(hidden[None])[0],
        "same_ms": lambda: ours(same, PLAIN),
    }
    difference = (runs["ours_ms"]() - runs["transformers_ms"]()).abs().max()
    assert difference < 1e-4, f"the two layers differ by {difference}"
    times: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(ROUNDS):
        for name, run in runs.items():
            began = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - began) * 1e3)
    used = len(ours.router(hidden).experts.unique())
    return {"experts_used": used, **{name: round(float(np.median(each)), 3) for name, each in times.items()}}


def main() -> None:
    """Measure both layers for every number of tokens."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--per-token", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--size", type=int, default=256, help="intermediate size of one expert")
    arguments = parser.parse_args()
    limit_spinning(os.environ)
    import torch

    torch.manual_seed(0)
    layers = make_layers(arguments.hidden, arguments.experts, arguments.per_token, arguments.size)
    results = []
    with torch.inference_mode():
        for tokens in STEP_TOKENS:
            row = measure(*layers, torch.randn(tokens, arguments.hidden))
            row["speed_up"] = round(row["transformers_ms"] / row["ours_ms"], 2)
            results.append({"step_tokens": tokens, **row})
            print(results[-1], flush=True)
    print(json.dumps({**vars(arguments), "results": results}))


if __name__ == "__main__":
    main()
