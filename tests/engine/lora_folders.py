"""Random LoRA adapters in PEFT's format, written without PEFT, and models with merged weights."""

import json
from math import sqrt

import torch

from engine.models.loader import checkpoint_views, load_config, load_model, write_tensors

KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def write_adapter(folder, model_folder, *, seed=0, kinds=KINDS, rank=4, layers=None, size=0.5, **fields):
    """Write a random adapter and return its updates scale * B A, by the names of the weights that they change.

    size: standard deviation of the values of A and B.
    """
    config = load_config(model_folder)
    heads, kv_heads = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = {
        "self_attn.q_proj": (heads, hidden),
        "self_attn.k_proj": (kv_heads, hidden),
        "self_attn.v_proj": (kv_heads, hidden),
        "self_attn.o_proj": (hidden, heads),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    random = torch.Generator().manual_seed(seed)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(kinds)}
    settings |= fields
    tensors, updates = {}, {}
    for layer in range(config.num_layers) if layers is None else layers:
        for module, (rows, inputs) in shapes.items():
            kind = module.split(".")[1]
            if kind in kinds:
                own = settings.get("rank_pattern", {}).get(kind, rank)
                alpha = settings.get("alpha_pattern", {}).get(kind, settings["lora_alpha"])
                down = size * torch.randn(own, inputs, generator=random) / sqrt(inputs)
                up = size * torch.randn(rows, own, generator=random)
                name = f"model.layers.{layer}.{module}"
                tensors[f"base_model.model.{name}.lora_A.weight"] = down
                tensors[f"base_model.model.{name}.lora_B.weight"] = up
                scale = alpha / (sqrt(own) if settings.get("use_rslora") else own)
                updates[f"{name}.weight"] = scale * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    write_tensors(tensors, folder / "adapter_model.safetensors")
    return updates


def merged_model(model_folder, updates):
    """The model with updates added to its weights."""
    model = load_model(model_folder)
    views = checkpoint_views(model)
    for name, update in updates.items():
        views[name] += update
    return model
