"""Heads of every kind with random weights, and folders in which other libraries publish them."""

import json
from dataclasses import replace

import torch
from huggingface_hub import save_torch_state_dict
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


def medusa(target, *, seed=0, count=3, blocks=1, has_bias=True):
    heads = MedusaHeads(target.config, count, blocks, has_bias=has_bias)
    heads.attach(target)
    return randomize(heads, seed)


WEIGHTS = "model.safetensors"
FILES = {"mtp": WEIGHTS, "eagle": WEIGHTS, "eagle3": WEIGHTS, "medusa": "medusa_lm_head.safetensors"}
"""Names of the files of weights by the kind of head."""


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


MIMO = "model.mtp_layers.0."


def as_mtp(folder, to, prefix, block, norms, projection, copies=(), **fields):
    """Write a saved MTP layer with other names, and with the embedding first.

    norms: names of the norms of embedding, state and output. copies: those of the target's embedding and output
    projection, if there are copies of them.
    """
    tensors, own = read(folder)
    layer = {name: tensor for name, tensor in tensors.items() if name.startswith(MIMO)}
    weight = layer.pop(f"{MIMO}input_proj.weight")
    names = dict(zip(("token_layernorm", "hidden_layernorm", "final_layernorm"), norms, strict=True))
    renamed = rename(layer, {f"{MIMO}{old}": prefix + new for old, new in names.items()} | {MIMO: block})
    renamed[f"{prefix}{projection}.weight"] = weight.roll(len(weight), dims=1)
    for name, copy in zip(("model.embed_tokens.weight", "lm_head.weight"), copies, strict=False):
        renamed[prefix + copy] = tensors[name]
    write(to, renamed, {**own, **fields})


def as_deepseek(folder, to, layer=2):
    """DeepSeek's names; with copies of the embedding and the projection, as DeepSeek ships them."""
    prefix, copies = f"model.layers.{layer}.", ("embed_tokens.weight", "shared_head.head.weight")
    as_mtp(folder, to, prefix, prefix, ("enorm", "hnorm", "shared_head.norm"), "eh_proj", copies)


def as_qwen(folder, to):
    norms = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
    as_mtp(folder, to, "mtp.", "mtp.layers.0.", norms, "fc", mtp_num_hidden_layers=1)


def as_speculators_eagle3(folder, to):
    """The format of the speculators library, which nests the fields of the decoder layer."""
    tensors, fields = read(folder)
    names = (
        *("draft_vocab_size", "norm_before_residual", "norm_before_fc", "fc_norm", "norm_output"),
        *("target_hidden_size", "eagle_aux_hidden_state_layer_ids"),
    )
    own = {name: fields.pop(name) for name in names}
    for name in ("architectures", "eagle_config", "num_aux_hidden_states"):
        del fields[name]
    head = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3", **own}
    write(to, rename(tensors, {"midlayer.": "layers.0."}), {**head, "transformer_layer_config": fields})


def as_pickle(folder, file, old=WEIGHTS, **options):
    """Replace the weights with a file of `torch.save`."""
    torch.save(load_file(folder / old), folder / file, **options)
    (folder / old).unlink()


def into_target(folder, target_folder, to, max_shard_size="5GB"):
    """Add the tensors of an MTP layer to a copy of its target."""
    tensors, fields = read(target_folder)
    own, _ = read(folder)
    tensors |= {name: tensor for name, tensor in own.items() if name not in tensors and name != "lm_head.weight"}
    to.mkdir()
    save_torch_state_dict(tensors, to, max_shard_size=max_shard_size)
    (to / "config.json").write_text(json.dumps({**fields, "num_nextn_predict_layers": 1}))
