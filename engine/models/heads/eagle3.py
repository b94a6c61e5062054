"""EAGLE-3 heads: one decoder layer over the embedding and a fusion of three of the target's hidden states.

Li et al., "EAGLE-3" (2025). They are read in the authors' format and in that of the speculators library, and written in
the former. The output projection may cover a reduced draft vocabulary: `d2t` is an offset, so that row i of the
projection belongs to the target's token i + d2t[i], and `t2d` marks these tokens among all of the target's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from engine.models.config import ModelConfig
from engine.models.decoder import Layer
from engine.models.heads.head import DraftHead, HeadOutput, normalize
from engine.models.heads.source import Blueprint, HeadFolder, Views, config_fields, head_views
from engine.models.layers import PLAIN, Attend, Ops, RMSNorm, Rotation, SelfAttention
from engine.models.loader import on_meta_device
from ssd.errors import UserError

AUTHORS, SPECULATORS = "midlayer.", "layers.0."
"""Prefixes of the decoder layer. vLLM and SGLang read either of them in both formats."""
EMBEDDING = "embed_tokens"
REDUNDANT = ("d2t", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")
LAYER_IDS = "eagle_aux_hidden_state_layer_ids"


_RETRY = "download or copy it again"


@dataclass(frozen=True)
class Eagle3Style:
    """Options of published checkpoints, named as in their configurations."""

    norm_before_residual: bool = False
    """Whether the residual stream begins with the normalized state."""
    norm_before_fc: bool = False
    """Whether the concatenated states of the target are normalized together."""
    fc_norm: bool = False
    """Whether each of the target's states is normalized."""
    norm_output: bool = False
    """Whether the state for the next draft position has passed the final norm."""


class Eagle3Layer(Layer):
    """A decoder layer whose attention reads the embedding beside the hidden state."""

    def __init__(self, config: ModelConfig, style: Eagle3Style) -> None:
        super().__init__(config, 0)
        assert isinstance(self.attention, SelfAttention)
        rows = self.attention.qkv_proj.out_features
        self.attention.qkv_proj = nn.Linear(2 * config.hidden_size, rows, bias=config.qkv_bias)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self._style = style

    def run(
        self, embeddings: Tensor, states: Tensor, ops: Ops, rotate: Rotation, attend: Attend
    ) -> tuple[Tensor, Tensor]:
        """Map embeddings and states to hidden states, given as residual + change, [N, hidden_size] each."""
        normalized = normalize(self.hidden_norm, states, ops)
        residual = normalized if self._style.norm_before_residual else states
        pairs = torch.cat((normalize(self.input_norm, embeddings, ops), normalized), dim=-1)
        change = self.attention(self.index, pairs, ops, rotate, attend)
        residual, hidden = self.mlp_norm.normalize_sum(residual, change, ops)
        return residual, self.feed_forward(hidden, ops)


class Eagle3Head(DraftHead):
    """`layer([embedding, state])`, then a norm and an output projection of its own."""

    def __init__(
        self,
        config: ModelConfig,
        hidden_layers: tuple[int, ...],
        style: Eagle3Style,
        *,
        target_hidden_size: int,
        draft_vocab_size: int,
    ) -> None:
        """config: shape of the layer. hidden_layers: layers of the target that it reads, ascending."""
        super().__init__(config)
        self.style = style
        self.hidden_layers = hidden_layers
        size, eps, count = config.hidden_size, config.rms_norm_eps, len(hidden_layers)
        self.fc = nn.Linear(count * target_hidden_size, size, bias=False)
        self.input_norm = RMSNorm(count * target_hidden_size, eps) if style.norm_before_fc else None
        self.fc_norm = nn.ModuleList(RMSNorm(target_hidden_size, eps) for _ in hidden_layers) if style.fc_norm else None
        self.layer = Eagle3Layer(config, style)
        self.norm = RMSNorm(size, eps)
        self.lm_head = nn.Linear(size, draft_vocab_size, bias=False)

    def target_states(self, hidden: Tensor) -> Tensor:
        """See `DraftHead.target_states`."""
        if self.fc_norm is not None:
            hidden = torch.stack([normalize(norm, hidden[:, at]) for at, norm in enumerate(self.fc_norm)], dim=1)
        fused = hidden.flatten(1)
        return self.fc(fused if self.input_norm is None else normalize(self.input_norm, fused))

    def forward(
        self, tokens: Tensor, states: Tensor, positions: Tensor, attend: Attend, ops: Ops = PLAIN
    ) -> HeadOutput:
        """See `DraftHead.forward`."""
        rotate = self.rotation(positions, ops, states)
        residual, change = self.layer.run(self.embed(tokens), states, ops, rotate, attend)
        state, hidden = self.norm.normalize_sum(residual, change, ops)
        return HeadOutput(hidden, hidden if self.style.norm_output else state)


def read_eagle3(source: HeadFolder, target: ModelConfig) -> Blueprint[Eagle3Head]:
    """Return the EAGLE-3 head of a folder. Raises UserError if it has none, or one for another target."""
    kind = source.fields.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise UserError(f"{source.folder} has a head of the kind {kind!r}, not 'eagle3'; give another folder")
    fields = {**source.fields, **source.layer_fields()}
    block = AUTHORS if any(name.startswith(AUTHORS) for name in source.names) else SPECULATORS
    source.refuse_without(f"{block}hidden_norm.weight", "an EAGLE-3 head")
    size, vocab_size = source.number(fields, "hidden_size"), source.number(fields, "vocab_size")
    target_size = source.number(fields, "target_hidden_size", size)
    source.refuse_other_target(target, {**fields, "hidden_size": target_size})
    source.refuse_several_layers(fields, "an EAGLE-3 head")
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
        if "lm_head.weight" not in source.names and draft_size == vocab_size:
            head.lm_head = None
        if f"{EMBEDDING}.weight" in source.names:
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
    return {
        **config_fields(config, dtype),
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
    if not _nested(fields).get("use_aux_hidden_state", True):
        raise UserError(
            f"{source.folder} has an EAGLE-3 head that reads only the last hidden state (use_aux_hidden_state is "
            "false), which this engine does not support; give another head"
        )
    if size != target_size and f"{EMBEDDING}.weight" not in source.names:
        raise UserError(
            f"{source.folder} lacks {EMBEDDING}.weight, which a head with another hidden size than its target needs; "
            "download or copy it again"
        )


def _views(head: Eagle3Head, block: str) -> Views:
    return head_views(head, block, {"embedding": EMBEDDING})


def read_draft_ids(source: HeadFolder, target: ModelConfig, size: int) -> Tensor | None:
    """Return the target's token of each row, int64 [draft vocabulary], or None if the checkpoint has no `d2t`.

    size: number of rows. Raises UserError unless `d2t` and `t2d` describe that number of different tokens of the
    target.
    """
    if "d2t" not in source.names:
        return None
    offsets = source.checkpoint.read("d2t")
    if offsets.is_floating_point():
        raise UserError(f"d2t in {source.folder} is stored as {offsets.dtype}, not as integers; {_RETRY}")
    if offsets.shape != (size,):
        raise UserError(f"d2t in {source.folder} has shape {tuple(offsets.shape)}, but needs {size} numbers; {_RETRY}")
    ids = torch.arange(size) + offsets
    outside = ((ids < 0) | (ids >= target.vocab_size)).nonzero()
    if len(outside):
        row = int(outside[0])
        raise UserError(
            f"d2t in {source.folder} maps row {row} to token {int(ids[row])}, but the target has tokens 0 to "
            f"{target.vocab_size - 1}; d2t must hold offsets from the row's number; give a head trained for this target"
        )
    if len(ids.unique()) < size:
        raise UserError(f"d2t in {source.folder} maps several rows to one token; {_RETRY}")
    if "t2d" in source.names and not torch.equal(source.checkpoint.read("t2d") != 0, _marks(ids, target.vocab_size)):
        raise UserError(f"d2t and t2d in {source.folder} name different tokens; {_RETRY}")
    return ids


def draft_ids(ids: Tensor, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t`, int64 [draft vocabulary], and `t2d`, bool [vocab_size], for the target's tokens of all rows."""
    ids = ids.cpu()
    return {"d2t": ids - torch.arange(len(ids)), "t2d": _marks(ids, vocab_size)}


def _marks(ids: Tensor, vocab_size: int) -> Tensor:
    return torch.zeros(vocab_size, dtype=torch.bool).index_fill(0, ids, True)
