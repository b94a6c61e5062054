"""Heads of every kind with random weights, and folders in which other libraries publish them."""

import json
from dataclasses import replace

import torch
from safetensors.torch import load_file, save_file

from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head, Eagle3Style
from engine.models.heads.medusa import MedusaHeads
from engine.models.heads.mtp import MtpHead


def randomize(module, seed=0):
    """Fill matrices so that they keep the size of their inputs, and vectors with noise, around 1 for norms."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            spread = 0.3 if parameter.ndim == 1 else parameter.shape[1] ** -0.5
            parameter.copy_(("norm" in name) + spread * torch.randn(parameter.shape, generator=generator))
    return module.eval().requires_grad_(False)


def draft_ids(vocab_size, count, seed=0):
    """Return `count` different tokens in ascending order, int64."""
    return torch.randperm(vocab_size, generator=torch.Generator().manual_seed(seed))[:count].sort().values


def mtp(target, *, seed=0, zeroes_first=True, **shape):
    head = MtpHead(replace(target.config, num_layers=1, **shape), target.config.num_layers, zeroes_first=zeroes_first)
    head.attach(target)
    return randomize(head, seed)


def eagle(target, *, seed=0, has_bias=True, has_embedding=False, **shape):
    config = replace(target.config, num_layers=1, **shape)
    head = EagleHead(config, target.config.num_layers, has_bias=has_bias)
    if has_embedding:
        head.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    head.attach(target)
    return randomize(head, seed)


def eagle3(target, *, seed=0, style=None, hidden_layers=(0, 1, 2), kept=200, has_embedding=False, **shape):
    config = replace(target.config, num_layers=1, **shape)
    head = Eagle3Head(
        config,
        hidden_layers,
        style or Eagle3Style(),
        target_hidden_size=target.config.hidden_size,
        draft_vocab_size=config.vocab_size if kept is None else kept,
    )
    if kept is not None:
        head.draft_vocabulary = draft_ids(config.vocab_size, kept)
    if has_embedding or config.hidden_size != target.config.hidden_size:
        head.embedding = torch.nn.Embedding(config.vocab_size, config.hidden_size)
    head.attach(target)
    return randomize(head, seed)


def medusa(target, *, seed=0, count=3, blocks=1):
    heads = MedusaHeads(target.config, count, blocks)
    heads.attach(target)
    return randomize(heads, seed)


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
