"""Measure steps and resident memory of a model with int8 and fp8 weights, beside the same model with float weights.

    python -m benchmarks.quantized [--model FOLDER] [--dtype float32] [--context 300] [--hidden 2048 --layers 8]

The quantized checkpoints are written to a temporary folder, in the formats of compressed-tensors. Steps of the three
kinds of weights alternate; memory is measured in processes that each load and pack one of them. With --hidden
or --layers the model has the shape of the given one with these sizes, and random weights.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.memory import resident_bytes
from benchmarks.steps import PAGE_SIZE, step_ms
from engine.models.shipped import SHIPPED_MODEL

STEP_TOKENS = (1, 4, 8, 16, 64)
ROUNDS = 40
BLOCK = 64
"""Rows and columns that share a scale in fp8; divides the channels of the shipped model."""
HEAD_DIM = 64


def write_float(folder: Path, source: Path, hidden: int | None, layers: int | None) -> None:
    """Write a model in bfloat16: that of `source`, or a random one of its shape with other sizes."""
    # PyTorch takes seconds to import; --help does not need it.
    from dataclasses import replace

    from engine.models.decoder import Decoder
    from engine.models.loader import load_config, load_model, save_model

    if hidden is None and layers is None:
        save_model(load_model(source), folder)
        return
    config = load_config(source)
    size = hidden or config.hidden_size
    shape = replace(
        config,
        hidden_size=size,
        intermediate_size=size * 11 // 4 // BLOCK * BLOCK,
        num_heads=size // HEAD_DIM,
        num_kv_heads=max(1, size // HEAD_DIM // 4),
        head_dim=HEAD_DIM,
        num_layers=layers or config.num_layers,
    )
    save_model(Decoder(shape).requires_grad_(False), folder)


def write_quantized(folder: Path, source: Path, kind: str) -> None:
    """Write the model in `source` with the weights of its layers as int8 or fp8."""
    import torch
    from safetensors.torch import load_file, save_file

    stored = {}
    for name, weight in load_file(source / "model.safetensors").items():
        if weight.ndim < 2 or not name.startswith("model.layers."):
            stored[name] = weight
            continue
        rows, columns = weight.shape
        block = (1, columns) if kind == "int8" else (BLOCK, BLOCK)
        blocks = weight.float().view(rows // block[0], block[0], columns // block[1], block[1])
        scales = blocks.abs().amax((1, 3)) / (127 if kind == "int8" else 448)
        values = (blocks / scales[:, None, :, None]).view_as(weight)
        stored[name] = values.round().to(torch.int8) if kind == "int8" else values.to(torch.float8_e4m3fn)
        stored[name + "_scale"] = scales
    folder.mkdir()
    save_file(stored, folder / "model.safetensors")
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    if kind == "fp8":
        weights = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [BLOCK, BLOCK]}
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "naive-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
        "ignore": ["lm_head"],
    }
    fields = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**fields, "quantization_config": quantization}))


def loaded_mib(folder: Path, dtype: str) -> float:
    """Return the resident memory that a loaded and packed model adds to this process."""
    from engine.models.loader import DTYPES, load_model
    from engine.models.packed import pack

    before = resident_bytes()
    model = pack(load_model(folder, dtype=DTYPES[dtype]))
    return (resident_bytes() - before) / (1 << 20) if model else 0.0


def measure(folders: dict[str, Path], dtype: str, context: int) -> list[dict[str, Any]]:
    """Return the medians of steps in ms by their number of tokens."""
    from engine.attention.plain import PlainAttention
    from engine.executor.runner import Runner
    from engine.models.loader import DTYPES, load_model
    from engine.models.packed import pack

    runners = {}
    for name, folder in folders.items():
        model = pack(load_model(folder, dtype=DTYPES[dtype]))
        attention = PlainAttention(model.config, context // PAGE_SIZE + 8, PAGE_SIZE, DTYPES[dtype], "cpu")
        runners[name] = Runner(model, attention)
    results = []
    for tokens in STEP_TOKENS:
        times: dict[str, list[float]] = {name: [] for name in runners}
        for _ in range(ROUNDS):
            for name, runner in runners.items():
                times[name].append(step_ms(runner, context, tokens))
        medians = {f"{name}_ms": round(float(np.median(values)), 2) for name, values in times.items()}
        results.append({"step_tokens": tokens, **medians})
        print(results[-1], flush=True)
    return results


def main() -> None:
    """Write the checkpoints and measure them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"], help="dtype to compute in")
    parser.add_argument("--context", type=int, default=300, help="tokens in the cache")
    parser.add_argument("--hidden", type=int, help=f"hidden size of a random model, a multiple of {HEAD_DIM}")
    parser.add_argument("--layers", type=int, help="layers of a random model")
    parser.add_argument("--loaded", action="store_true", help="only print the memory in MiB that the model takes")
    arguments = parser.parse_args()
    if arguments.loaded:
        print(loaded_mib(arguments.model, arguments.dtype))
        return
    with tempfile.TemporaryDirectory() as work:
        folders = {name: Path(work, name) for name in ("float", "int8", "fp8")}
        write_float(folders["float"], arguments.model, arguments.hidden, arguments.layers)
        for name in ("int8", "fp8"):
            write_quantized(folders[name], folders["float"], name)
        memory = {}
        for name, folder in folders.items():
            command = [sys.executable, "-m", __spec__.name, "--loaded", "--model", folder, "--dtype", arguments.dtype]
            run = subprocess.run(command, check=True, capture_output=True, text=True)
            memory[name] = round(float(run.stdout), 1)
        print({f"{name}_mib": size for name, size in memory.items()}, flush=True)
        results = measure(folders, arguments.dtype, arguments.context)
    print(json.dumps({"dtype": arguments.dtype, "memory_mib": memory, "results": results}))


if __name__ == "__main__":
    main()
