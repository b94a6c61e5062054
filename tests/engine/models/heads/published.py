"""Rewrite folders of `save_head` as other libraries publish heads of the same network."""

from __future__ import annotations

import json

import torch
from safetensors.torch import load_file, save_file

WEIGHTS = "model.safetensors"


def read(folder, file=WEIGHTS):
    """Return the tensors and the configuration of a folder."""
    return load_file(folder / file), json.loads((folder / "config.json").read_text())


def write(folder, tensors, fields, file=WEIGHTS):
    folder.mkdir(parents=True, exist_ok=True)
    save_file({name: tensor.clone().contiguous() for name, tensor in tensors.items()}, folder / file)
    (folder / "config.json").write_text(json.dumps(fields))


def rename(tensors, names):
    """Replace each prefix in `names` by its value; the first one that fits."""
    renamed = {}
    for name, tensor in tensors.items():
        prefix = next((old for old in names if name.startswith(old)), "")
        renamed[names.get(prefix, "") + name.removeprefix(prefix)] = tensor
    return renamed


def mtp_block(folder):
    """Return the tensors of a saved MTP layer alone, embedding first, and its configuration."""
    tensors, fields = read(folder)
    layer = {name: tensor for name, tensor in tensors.items() if "mtp_layers" in name}
    projection = layer["model.mtp_layers.0.input_proj.weight"]
    layer["model.mtp_layers.0.input_proj.weight"] = projection.roll(len(projection), dims=1)
    return layer, fields


def as_deepseek(folder, to, layer=2):
    """DeepSeek's names; with copies of the embedding and the projection, as DeepSeek ships them."""
    tensors, fields = mtp_block(folder)
    prefix = "model.mtp_layers.0."
    renamed = rename(
        tensors,
        {
            f"{prefix}token_layernorm": f"model.layers.{layer}.enorm",
            f"{prefix}hidden_layernorm": f"model.layers.{layer}.hnorm",
            f"{prefix}input_proj": f"model.layers.{layer}.eh_proj",
            f"{prefix}final_layernorm": f"model.layers.{layer}.shared_head.norm",
            prefix: f"model.layers.{layer}.",
        },
    )
    whole, _ = read(folder)
    renamed[f"model.layers.{layer}.embed_tokens.weight"] = whole["model.embed_tokens.weight"]
    renamed[f"model.layers.{layer}.shared_head.head.weight"] = whole["lm_head.weight"]
    write(to, renamed, fields)


def as_qwen(folder, to):
    tensors, fields = mtp_block(folder)
    prefix = "model.mtp_layers.0."
    renamed = rename(
        tensors,
        {
            f"{prefix}token_layernorm": "mtp.pre_fc_norm_embedding",
            f"{prefix}hidden_layernorm": "mtp.pre_fc_norm_hidden",
            f"{prefix}input_proj": "mtp.fc",
            f"{prefix}final_layernorm": "mtp.norm",
            prefix: "mtp.layers.0.",
        },
    )
    write(to, renamed, {**fields, "mtp_num_hidden_layers": 1})


LAYER_FIELDS = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "hidden_act",
    "attention_bias",
    "mlp_bias",
)


def speculators_config(kind, fields, **own):
    """A configuration as the speculators library writes it."""
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": kind,
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "default_proposal_method": "greedy",
            "verifier": {"name_or_path": "org/model", "architectures": ["LlamaForCausalLM"]},
        },
        "transformer_layer_config": {name: fields[name] for name in LAYER_FIELDS},
        **own,
    }


def as_speculators_eagle3(folder, to):
    tensors, fields = read(folder)
    own = (
        "draft_vocab_size",
        "norm_before_residual",
        "norm_before_fc",
        "fc_norm",
        "norm_output",
        "target_hidden_size",
        "eagle_aux_hidden_state_layer_ids",
    )
    write(
        to,
        rename(tensors, {"midlayer.": "layers.0."}),
        speculators_config("eagle3", fields, **{name: fields[name] for name in own}),
    )


def as_pickle(folder, file, old=WEIGHTS, **options):
    """Replace the weights with a file of `torch.save`."""
    torch.save(load_file(folder / old), folder / file, **options)
    (folder / old).unlink()


def into_target(folder, target_folder, to, shards=1):
    """Add the tensors of an MTP layer to a copy of its target, in one file or several."""
    tensors, fields = read(target_folder)
    own, _ = read(folder)
    tensors |= {name: tensor for name, tensor in own.items() if name not in tensors and name != "lm_head.weight"}
    fields["num_nextn_predict_layers"] = 1
    if shards == 1:
        write(to, tensors, fields)
        return
    to.mkdir()
    names = sorted(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = {name: tensors[name] for name in names[index::shards]}
        save_file(part, to / file)
        weight_map.update(dict.fromkeys(part, file))
    (to / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    (to / "config.json").write_text(json.dumps(fields))
