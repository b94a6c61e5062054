"""Files for tests of vLLM: LoRA adapters, a chat template, and a correction of its sampling on CPUs."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tests.hosts.vllm_server import MODEL

RANK = 8
SCALE = 0.1
"""Large enough to change most outputs."""
CHAT_TEMPLATE = """{% for message in messages %}# {{ message.role }}: {{ message.content }}
{% endfor %}{% for tool in tools or [] %}# {{ tool.function.name }}
{% endfor %}"""

CORRECTION = """\
def register():
    from vllm.utils import cpu_triton_utils

    cpu_triton_utils._expand_kernel_impl = expand


def expand(output, values, ends, replace_from, replace_to, MAX_NUM_TOKENS=None):
    import torch

    counts = torch.diff(ends, prepend=ends.new_zeros(1))
    output.copy_(torch.where(values == replace_from, replace_to, values).repeat_interleave(counts))
"""
"""A plug-in of vLLM. Whatever the drafter is, version 0.32 for CPUs leaves temperature, top_k and top_p of draft tokens
uninitialized: `vllm/utils/cpu_triton_utils.py` writes them into a copy."""


def make_adapter(folder: Path, seed: int) -> Path:
    """Write a random LoRA adapter for the shipped model in PEFT's format; return its folder."""
    config = json.loads((MODEL / "config.json").read_text())
    hidden, inner, head = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    shapes = {
        "self_attn.q_proj": (hidden, head * config["num_attention_heads"]),
        "self_attn.v_proj": (hidden, head * config["num_key_value_heads"]),
        "mlp.down_proj": (inner, hidden),
    }
    rng = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        for name, (size_in, size_out) in shapes.items():
            prefix = f"base_model.model.model.layers.{layer}.{name}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(RANK, size_in, generator=rng) * size_in**-0.5
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(size_out, RANK, generator=rng) * SCALE
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = [name.rpartition(".")[2] for name in shapes]
    adapter = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": targets, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(adapter))
    return folder


def make_correction(folder: Path) -> Path:
    """Write a plug-in of vLLM that corrects sampling on CPUs; return the folder, which PYTHONPATH must contain."""
    metadata = folder / "vllm_correction-0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm-correction\nVersion: 0\n")
    (metadata / "entry_points.txt").write_text("[vllm.general_plugins]\ncorrection = vllm_correction:register\n")
    (folder / "vllm_correction.py").write_text(CORRECTION)
    return folder
