"""Random LoRA adapters in PEFT's format, written without PEFT, and models with merged weights."""

import json
from math import sqrt

import torch
from safetensors import safe_open

from engine.models.loader import checkpoint_views, load_model, write_tensors

FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
KINDS = ("q_proj", "k_proj", "v_proj", "o_proj", *FEED_FORWARD)
LATENT_KINDS = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj", *FEED_FORWARD)


def write_adapter(folder, model_folder, *, seed=0, kinds=KINDS, rank=4, layers=None, size=0.5, **fields):
    """Write a random adapter and return its updates scale * B A, by the names of the weights that they change.

    size: standard deviation of the values of A and B.
    """
    random = torch.Generator().manual_seed(seed)
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "bias": "none", "target_modules": list(kinds)}
    settings |= fields
    tensors, updates = {}, {}
    for name, (rows, inputs) in _linear_layers(model_folder).items():
        layer, kind = int(name.split(".")[2]), name.rpartition(".")[2]
        if kind in kinds and (layers is None or layer in layers):
            own = settings.get("rank_pattern", {}).get(kind, rank)
            alpha = settings.get("alpha_pattern", {}).get(kind, settings["lora_alpha"])
            down = size * torch.randn(own, inputs, generator=random) / sqrt(inputs)
            up = size * torch.randn(rows, own, generator=random)
            tensors[f"base_model.model.{name}.lora_A.weight"] = down
            tensors[f"base_model.model.{name}.lora_B.weight"] = up
            scale = alpha / (sqrt(own) if settings.get("use_rslora") else own)
            updates[f"{name}.weight"] = scale * up @ down
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    write_tensors(tensors, folder / "adapter_model.safetensors")
    return updates


def _linear_layers(model_folder):
    """Return the shapes of the linear layers in a model's files by their names, without routers and experts."""
    shapes = {}
    for path in sorted(model_folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in sorted(file.keys()):
                if name.endswith(("_proj.weight", "_mqa.weight")):
                    shapes[name.removesuffix(".weight")] = file.get_slice(name).get_shape()
    return {name: shape for name, shape in shapes.items() if ".experts." not in name}


def merged_model(model_folder, updates):
    """The model with updates added to its weights."""
    model = load_model(model_folder)
    views = checkpoint_views(model)
    for name, update in updates.items():
        views[name] += update
    return model
