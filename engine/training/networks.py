"""New draft heads for a target, initialized from its weights."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.decoder import Decoder, Layer
from engine.models.heads.eagle import EagleHead
from engine.models.heads.eagle3 import Eagle3Head, Eagle3Style
from engine.models.heads.head import normalize
from engine.models.heads.medusa import MedusaHeads, ResidualBlock
from engine.models.heads.mtp import MtpHead
from engine.models.layers import SelfAttention
from engine.training.objectives import Windows

RIDGE = 1e-3
"""Regularization of least squares, relative to the mean square of the inputs."""
OWN_ROW_HEADS = 2
"""Further key-value heads of an EAGLE-3 head that attend to their own row. Rows of 128 values explain 0.59 of the
variance of the shipped target's last layer's input, 192 explain 0.64, and all 320 explain 0.66."""
OWN_ROW_COMPONENTS = 5
"""Components of their queries and keys that are not zero, for a head dimension of 64."""
OWN_ROW_STRENGTH = 12.0
"""Size of these components. Tokens per step of the new head with 3, 5, 7 and 10 components: 1.52, 1.85, 1.81, 1.73."""
MEDUSA_SHARPNESS = 1.5
"""Factor of the logits of an estimated state, which is nearer to the mean than the state itself. With 1.0 the first
head's drafts were accepted with a probability of 0.208, with 1.5 of 0.218, with 2.0 of 0.213."""


@torch.no_grad()
def new_mtp(target: Decoder, sample: Windows) -> MtpHead:
    """Return an MTP head whose layer is the target's last one; `fc` estimates that layer's input.

    sample: windows with the states after the last but one and the last layer.
    """
    config = target.config
    head = MtpHead(replace(config, num_layers=1), config.num_layers)
    head.attach(target)
    head.layer.load_state_dict(_last_layer(target).state_dict())
    head.norm.load_state_dict(target.norm.state_dict())
    pairs = _pairs(target, sample)
    norms = (head.embedding_norm, head.hidden_norm)
    inputs = torch.cat([normalize(norm, each) for norm, each in zip(norms, pairs, strict=True)], dim=-1)
    head.fc.weight.copy_(least_squares(inputs, sample.states[:, 1:, -2].flatten(0, 1)))
    return head


@torch.no_grad()
def new_eagle(target: Decoder, sample: Windows) -> EagleHead:
    """Return an EAGLE head whose layer is the target's last one; `fc` estimates that layer's input.

    sample: windows with the states after the last but one and the last layer. The head's output takes the place of the
    target's normalized state, so its residual stream is the target's, scaled by the final norm.
    """
    config, last = target.config, _last_layer(target)
    # Without a bias, which vLLM ignores.
    head = EagleHead(replace(config, num_layers=1), config.num_layers, has_bias=False)
    head.attach(target)
    wanted = sample.states[:, 1:].flatten(0, 1)
    scale = target.norm.weight / _rms(wanted[:, -1])
    weights = {name: tensor for name, tensor in last.state_dict().items() if not name.startswith("input_norm")}
    qkv_proj = _attention(last).qkv_proj
    weights["attention.qkv_proj.weight"] = qkv_proj.weight * last.input_norm.weight / (scale * _rms(wanted[:, -2]))
    weights["mlp_norm.weight"] = last.mlp_norm.weight / scale * scale.mean()
    for name in ("attention.o_proj", "feed_forward.down_proj"):
        weights[f"{name}.weight"] = weights[f"{name}.weight"] * scale[:, None]
    head.layer.load_state_dict(weights)
    embeddings, states = _pairs(target, sample)
    head.fc.weight.copy_(least_squares(torch.cat((embeddings, states), dim=-1), wanted[:, -2] * scale))
    return head


@torch.no_grad()
def new_eagle3(target: Decoder, layers: tuple[int, ...], draft_vocabulary: Tensor, sample: Windows) -> Eagle3Head:
    """Return an EAGLE-3 head whose layer is the target's last one with further attention heads.

    In this network the token's embedding reaches the residual stream only through attention. The further heads attend
    to their own row, and their values estimate the input of the target's last layer. The head returns its normalized
    state and `fc` estimates the target's, so that both are alike.

    layers: those whose hidden states it reads. draft_vocabulary: int64 [V], ascending, the tokens that it can draft.
    sample: windows with the states after `layers`, the last but one and the last layer.
    """
    config, last = target.config, _last_layer(target)
    group = config.num_heads // config.num_kv_heads
    shape = replace(
        config,
        num_layers=1,
        num_heads=config.num_heads + OWN_ROW_HEADS * group,
        num_kv_heads=config.num_kv_heads + OWN_ROW_HEADS,
    )
    size = config.hidden_size
    head = Eagle3Head(
        shape, layers, Eagle3Style(norm_output=True), target_hidden_size=size, draft_vocab_size=len(draft_vocabulary)
    )
    head.draft_vocabulary = draft_vocabulary
    head.attach(target)
    head.norm.load_state_dict(target.norm.state_dict())
    assert isinstance(head.lm_head, nn.Linear)
    head.lm_head.weight.copy_(target.lm_head.weight[draft_vocabulary])
    embeddings, states = _pairs(target, sample)
    wanted = sample.states[:, 1:, -2].flatten(0, 1)
    read = sample.states[:, :-1, : len(layers)].flatten(0, 1)
    head.fc.weight.copy_(least_squares(read.flatten(1), states))
    weights = dict(last.state_dict())
    weights["hidden_norm.weight"] = weights["input_norm.weight"] = torch.ones(size)
    states = head.target_states(read)
    inputs = torch.cat(
        (normalize(head.layer.input_norm, embeddings), normalize(head.layer.hidden_norm, states)), dim=-1
    )
    rows = [count * config.head_dim for count in (config.num_heads, config.num_kv_heads, config.num_kv_heads)]
    query, key, value = least_squares(inputs, _attention(last).qkv_proj(normalize(last.input_norm, wanted))).split(rows)
    own_value, own_output = _low_rank(inputs, wanted - states, OWN_ROW_HEADS * config.head_dim)
    own_key = _own_row_pattern(inputs, config.head_dim)
    weights["attention.qkv_proj.weight"] = torch.cat(
        (query, *[own_key] * (OWN_ROW_HEADS * group), key, *[own_key] * OWN_ROW_HEADS, value, own_value)
    )
    columns = [part for part in own_output.split(config.head_dim, dim=1) for _ in range(group)]
    output = _attention(last).o_proj.weight
    weights["attention.o_proj.weight"] = torch.cat((output, *(part / group for part in columns)), dim=1)
    head.layer.load_state_dict(weights)
    return head


def _own_row_pattern(inputs: Tensor, head_dim: int) -> Tensor:
    """Return a projection [head_dim, I] for queries and keys that attend to the own row only.

    It is nearly constant, and non-zero in components that rope turns fast: the scores of other rows are lower.
    """
    constant = least_squares(inputs, torch.ones(len(inputs), 1))
    pattern = torch.zeros(head_dim, 1)
    pattern[: max(1, OWN_ROW_COMPONENTS * head_dim // 64)] = OWN_ROW_STRENGTH
    return pattern @ constant


def _low_rank(inputs: Tensor, outputs: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return matrices [rank, I] and [O, rank] whose product estimates outputs [N, O] from inputs [N, I]."""
    full = least_squares(inputs, outputs)
    directions = torch.linalg.svd(inputs @ full.T, full_matrices=False).Vh[:rank]
    down = directions @ full
    scale = _rms(inputs @ down.T)
    # Fewer directions than `rank` if the target is narrower.
    padding = rank - len(directions)
    return F.pad(down / scale, (0, 0, 0, padding)), F.pad(directions.T * scale, (0, padding))


@torch.no_grad()
def new_medusa(target: Decoder, count: int, sample: Windows) -> MedusaHeads:
    """Return Medusa heads whose blocks are the identity; each projection expects a state that is estimated linearly.

    sample: windows with the state after the last layer.
    """
    heads = MedusaHeads(target.config, count)
    heads.attach(target)
    states = normalize(target.norm, sample.states[:, :, -1])
    for index, head in enumerate(heads.heads):
        assert isinstance(head, nn.Sequential)
        *blocks, projection = head
        assert isinstance(projection, nn.Linear)
        for block in blocks:
            assert isinstance(block, ResidualBlock)
            block.linear.weight.zero_()
            block.linear.bias.zero_()
        ahead = index + 1
        advance = least_squares(states[:, :-ahead].flatten(0, 1), states[:, ahead:].flatten(0, 1))
        projection.weight.copy_(MEDUSA_SHARPNESS * target.lm_head.weight @ advance)
    return heads


@torch.no_grad()
def new_draft_model(target: Decoder, num_layers: int) -> Decoder:
    """Return a copy of the target with fewer layers, evenly spaced from its first one to its last but one.

    Raises ValueError if the target does not have more layers, or if a copied layer has experts where the draft model's
    has none.
    """
    count = target.config.num_layers
    if not 1 <= num_layers < count:
        raise ValueError(f"a draft model for a target of {count} layers has 1 to {count - 1} layers, not {num_layers}")
    kept = np.linspace(0, max(0, count - 2), num_layers).round().astype(int).tolist()
    experts = target.config.experts
    if experts is not None and any(
        (index in experts.layers) != (own in experts.layers) for index, own in enumerate(kept)
    ):
        raise ValueError(
            "a draft model cannot begin with layers of this target, whose first ones have no experts; train medusa"
        )
    model = Decoder(replace(target.config, num_layers=num_layers))
    weights = {name: tensor for name, tensor in target.state_dict().items() if not name.startswith("layers.")}
    for index, own in enumerate(kept):
        layer = target.layers[own].state_dict()
        weights.update({f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    model.load_state_dict(weights)
    return model


def frequent_tokens(tokens: np.ndarray, vocab_size: int, count: int) -> Tensor:
    """Return the `count` most frequent token ids, ascending, int64."""
    counts = np.bincount(tokens.ravel(), minlength=vocab_size)
    return torch.from_numpy(np.sort(np.argsort(-counts, kind="stable")[:count]).astype(np.int64))


def _last_layer(target: Decoder) -> Layer:
    layer = target.layers[-1]
    assert isinstance(layer, Layer)
    return layer


def _attention(layer: Layer) -> SelfAttention:
    assert isinstance(layer.attention, SelfAttention)
    return layer.attention


def least_squares(inputs: Tensor, outputs: Tensor) -> Tensor:
    """Return the matrix [O, I] that maps inputs [N, I] to outputs [N, O] with the least squared error (ridge)."""
    gram = inputs.T @ inputs
    gram += RIDGE * gram.trace() / len(gram) * torch.eye(len(gram))
    return torch.linalg.solve(gram, inputs.T @ outputs).T


def _pairs(target: Decoder, sample: Windows) -> tuple[Tensor, Tensor]:
    """Return embeddings and the normalized states of the tokens before them, [N, hidden_size] each."""
    states = normalize(target.norm, sample.states[:, :-1, -1])
    return target.embedding(sample.tokens[:, 1:]).flatten(0, 1), states.flatten(0, 1)


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())
