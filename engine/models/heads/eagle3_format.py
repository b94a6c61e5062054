"""Read and write EAGLE-3 heads: the authors' format, and that of the speculators library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.families import config_to_hf
from engine.models.heads.eagle3 import Eagle3Head, Eagle3Style
from engine.models.heads.source import Blueprint, HeadFolder, Views, layer_views
from engine.models.heads.vocabulary import draft_ids, read_draft_ids
from engine.models.loader import on_meta_device
from ssd.errors import UserError

AUTHORS, SPECULATORS = "midlayer.", "layers.0."
"""Prefixes of the decoder layer. vLLM and SGLang read either of them in both formats."""
EMBEDDING, PROJECTION = "embed_tokens.weight", "lm_head.weight"
REDUNDANT = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


def read_eagle3(source: HeadFolder, target: ModelConfig) -> Blueprint[Eagle3Head]:
    """Return the EAGLE-3 head of a folder. Raises UserError if it has none, or one for another target."""
    source.refuse_other_kind("eagle3")
    fields = {**source.fields, **source.layer_fields()}
    block = AUTHORS if any(name.startswith(AUTHORS) for name in source.names) else SPECULATORS
    source.refuse_without(f"{block}hidden_norm.weight", "an EAGLE-3 head")
    size, vocab_size = source.number(fields, "hidden_size"), source.number(fields, "vocab_size")
    target_size = source.number(fields, "target_hidden_size", size)
    source.refuse_other_target(target, hidden_size=target_size, vocab_size=vocab_size)
    _refuse_unsupported(source, fields, size, target_size)
    config = replace(source.layer_config(fields, block, target), num_layers=1)
    draft_size = source.number(fields, "draft_vocab_size", vocab_size)
    ids = read_draft_ids(source, target, draft_size)
    if ids is None and draft_size != vocab_size:
        raise UserError(f"{source.folder} lacks d2t, the tokens of its draft vocabulary; download or copy it again")
    hidden_layers = _hidden_layers(source, fields, target)

    def new_head() -> Eagle3Head:
        head = Eagle3Head(
            config, hidden_layers, _style(fields), target_hidden_size=target_size, draft_vocab_size=draft_size
        )
        if PROJECTION not in source.names and draft_size == vocab_size:
            head.lm_head = None
        if EMBEDDING in source.names:
            head.embedding = nn.Embedding(vocab_size, size)
        return head

    def finish(head: Eagle3Head) -> None:
        # Files of heads with the full vocabulary may have offsets of zero.
        if ids is not None and draft_size < vocab_size:
            head.draft_vocabulary = ids.to(head.fc.weight.device)

    return Blueprint(
        on_meta_device(new_head),
        lambda head: _views(head, block),
        is_redundant=lambda name: name in REDUNDANT,
        finish=finish,
    )


def eagle3_files(head: Eagle3Head, dtype: torch.dtype) -> tuple[dict[str, Any], Mapping[str, Tensor]]:
    """Return the configuration and the tensors of a head in the authors' format.

    Layers whose states a head reads are numbered in two ways, see `_hidden_layers`; both are written. vLLM has no
    class for heads with biases of queries, keys and values, and SGLang none for those with `norm_before_residual` or
    with normalized queries and keys.
    """
    views = _views(head, AUTHORS)
    config = head.config
    vocab_size = config.vocab_size
    if head.draft_vocabulary is not None:
        views |= draft_ids(head.draft_vocabulary, vocab_size)
    fields = config_to_hf(replace(config, num_layers=1, tie_embeddings=False), str(dtype).removeprefix("torch."))
    return {
        **fields,
        "architectures": ["Eagle3Qwen3ForCausalLM" if config.qk_norm else "LlamaForCausalLMEagle3"],
        "model_type": "qwen3" if config.qk_norm else "llama",
        "attention_bias": config.qkv_bias,
        **asdict(head.style),
        "draft_vocab_size": vocab_size if head.draft_vocabulary is None else len(head.draft_vocabulary),
        "target_hidden_size": head.fc.in_features // len(head.hidden_layers),
        "num_aux_hidden_states": len(head.hidden_layers),
        LAYER_IDS: list(head.hidden_layers),
        "eagle_config": {
            LAYER_IDS: [layer - 1 for layer in head.hidden_layers],
            "use_aux_hidden_state": True,
            "norm_before_fc": head.style.norm_before_fc,
        },
    }, views


def _style(fields: Mapping[str, Any]) -> Eagle3Style:
    nested = _nested(fields)
    return Eagle3Style(
        norm_before_residual=bool(fields.get("norm_before_residual")),
        norm_before_fc=bool(nested.get("norm_before_fc", fields.get("norm_before_fc"))),
        fc_norm=bool(fields.get("fc_norm")),
        norm_output=bool(fields.get("norm_output")),
    )


def _nested(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    nested = fields.get("eagle_config")
    return nested if isinstance(nested, dict) else {}


def _hidden_layers(source: HeadFolder, fields: Mapping[str, Any], target: ModelConfig) -> tuple[int, ...]:
    """Return the layers of the target whose states the head reads, as numbers of layers that were run before.

    The field at the top (speculators, vLLM) numbers layers so, by the layer that a state enters. The one in
    `eagle_config` (ModelOpt, SGLang) numbers them by the layer that a state leaves, which is one less. States are
    always concatenated in the order of layers.
    """
    count = target.num_layers
    entered, left = fields.get(LAYER_IDS), _nested(fields).get(LAYER_IDS)
    given = entered or left
    if given:
        if not isinstance(given, list) or not all(isinstance(layer, int) for layer in given):
            raise UserError(f"{LAYER_IDS} in {source.folder}/config.json must be a list of layers; copy the file again")
        layers = given if entered else [layer + 1 for layer in given]
    else:
        layers = [2, count // 2, count - 3]
    if len({*layers}) < len(layers) or not all(0 <= layer <= count for layer in layers):
        origin = "names" if given else f"lacks {LAYER_IDS}, which means"
        raise UserError(
            f"{source.folder}/config.json {origin} the layers {', '.join(map(str, layers))} of the target, but this "
            f"target needs different ones from 0 to {count}; give a head trained for it"
        )
    expected = source.number(fields, "num_aux_hidden_states", len(layers))
    if expected != len(layers):
        raise UserError(
            f"{source.folder}/config.json names {len(layers)} layers of the target and {expected} as "
            "num_aux_hidden_states; download or copy it again"
        )
    return tuple(sorted(layers))


def _refuse_unsupported(source: HeadFolder, fields: Mapping[str, Any], size: int, target_size: int) -> None:
    if source.number(fields, "num_hidden_layers", 1) != 1:
        raise UserError(f"{source.folder} has an EAGLE-3 head of several layers; give a head of one layer")
    if not _nested(fields).get("use_aux_hidden_state", True):
        raise UserError(
            f"{source.folder} has an EAGLE-3 head that reads only the last hidden state (use_aux_hidden_state is "
            "false), which this engine does not support; give another head"
        )
    if size != target_size and EMBEDDING not in source.names:
        raise UserError(
            f"{source.folder} lacks {EMBEDDING}, which a head with another hidden size than its target needs; "
            "download or copy it again"
        )


def _views(head: Eagle3Head, block: str) -> Views:
    views: Views = {"fc.weight": head.fc.weight.detach(), "norm.weight": head.norm.weight.detach()}
    if head.input_norm is not None:
        views["input_norm.weight"] = head.input_norm.weight.detach()
    if head.fc_norm is not None:
        views.update({f"fc_norm.{name}": parameter.detach() for name, parameter in head.fc_norm.named_parameters()})
    if head.lm_head is not None:
        assert isinstance(head.lm_head, nn.Linear)
        views[PROJECTION] = head.lm_head.weight.detach()
    if head.embedding is not None:
        views[EMBEDDING] = head.embedding.weight.detach()
    return views | layer_views(head.layer, head.config, block)
