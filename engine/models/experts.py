"""Mixture of experts: a router, stacked experts, and experts that all tokens share.

Fedus et al., "Switch Transformers" (2021); routing as in Mixtral, Qwen3-MoE and DeepSeek-V2 and V3. The rows of a step
are sorted by expert, so that the weights of each expert in use are read once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from engine.models.config import ExpertsConfig
from engine.models.layers import FeedForward, Ops


class Routes(NamedTuple):
    """The experts of N tokens."""

    experts: Tensor
    """int64 [N, K]: K different experts for each token, the best first."""
    weights: Tensor
    """float32 [N, K]: factors of their outputs."""


class Groups(NamedTuple):
    """The N * K pairs of a token and an expert, sorted by expert."""

    order: Tensor
    """int64 [N * K]: index of each sorted pair among the pairs in the order of tokens."""
    ends: Tensor
    """int32 [experts]: number of sorted pairs up to those of each expert."""
    spans: Sequence[tuple[int, int, int]] | None
    """Expert, first and end row of each expert in use, on a CPU; None on other devices, because reading them
    would wait for the device."""


class MixtureOfExperts(nn.Module):
    """Feed-forward network of several experts, of which each token uses a few."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.router = Router(hidden_size, config)
        self.experts = Experts(hidden_size, config)
        self.shared = FeedForward(hidden_size, config.shared_size) if config.shared_size else None

    def forward(self, hidden: Tensor, ops: Ops) -> Tensor:
        """Map hidden states [N, hidden_size] to [N, hidden_size]."""
        routed: Tensor = self.experts(hidden, self.router(hidden), ops)
        return routed if self.shared is None else routed + self.shared(hidden, ops)


class Router(nn.Module):
    """Chooses experts for each token.

    It computes in float32 for models of any dtype, because rounded scores may choose other experts.
    """

    correction: nn.Parameter | None
    """float32 [experts]: added to the scores by which experts are chosen, but not to their weights."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self._config = config
        self.proj = nn.Linear(hidden_size, config.count, bias=False)
        self.correction = nn.Parameter(torch.zeros(config.count)) if config.has_correction else None

    def forward(self, hidden: Tensor) -> Routes:
        """Choose experts for hidden states [N, hidden_size]."""
        return route(self.proj(hidden.float()), self.correction, self._config)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:
        # `Module.to` with a dtype moves these weights, but does not convert them.
        return super()._apply(lambda tensor: tensor.to(fn(tensor).device), recurse)


class Experts(nn.Module):
    """Feed-forward networks whose weights are stacked."""

    def __init__(self, hidden_size: int, config: ExpertsConfig) -> None:
        super().__init__()
        self.gate_up_proj = GroupedLinear(config.count, hidden_size, 2 * config.intermediate_size)
        self.down_proj = GroupedLinear(config.count, config.intermediate_size, hidden_size)

    def forward(self, hidden: Tensor, routes: Routes, ops: Ops) -> Tensor:
        """Return the weighted sum of the outputs of each token's experts, [N, hidden_size] for [N, hidden_size]."""
        groups = group_by_expert(routes.experts, self.gate_up_proj.count)
        tokens, per_token = routes.experts.shape
        rows = hidden[groups.order // per_token]
        rows = self.down_proj(ops.gate(self.gate_up_proj(rows, groups)), groups)
        outputs = torch.empty_like(rows).index_copy_(0, groups.order, rows).view(tokens, per_token, -1)
        return (outputs * routes.weights[:, :, None]).sum(1).to(hidden.dtype)


class GroupedLinear(nn.Module):
    """One linear layer without bias for each expert."""

    def __init__(self, count: int, inputs: int, outputs: int) -> None:
        super().__init__()
        self.count = count
        self.weight = nn.Parameter(torch.empty(count, outputs, inputs))
        nn.init.normal_(self.weight, std=inputs**-0.5)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """Map sorted rows [R, in] to [R, out], each with its expert's layer."""
        if groups.spans is None:
            return F.grouped_mm(rows, self.weight.transpose(1, 2), offs=groups.ends)
        return torch.cat([F.linear(rows[first:end], self.weight[expert]) for expert, first, end in groups.spans])


class LinearPerExpert(nn.Module):
    """One separate layer for each expert, on a CPU. Takes the place of a `GroupedLinear`."""

    def __init__(self, layers: Iterable[nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self.count = len(self.layers)

    def forward(self, rows: Tensor, groups: Groups) -> Tensor:
        """See `GroupedLinear.forward`."""
        assert groups.spans is not None
        return torch.cat([self.layers[expert](rows[first:end]) for expert, first, end in groups.spans])


def route(logits: Tensor, correction: Tensor | None, config: ExpertsConfig) -> Routes:
    """Choose experts by the router's logits, float32 [N, experts]. correction: see `Router`."""
    scores = logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)
    ranked = scores if correction is None else scores + correction
    if config.groups_kept < config.groups:
        ranked = _keep_best_groups(ranked, config)
    experts = ranked.topk(config.per_token, dim=-1).indices
    weights = scores.gather(1, experts)
    if config.is_normalized:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return Routes(experts, weights * config.scaling)


def _keep_best_groups(scores: Tensor, config: ExpertsConfig) -> Tensor:
    """Set the scores [N, experts] outside of each token's best groups to -inf (DeepSeek-V2, 2024, section 2.2.2)."""
    grouped = scores.unflatten(1, (config.groups, -1))
    group_scores = grouped.topk(config.group_members, dim=-1).values.sum(-1)
    kept = group_scores.topk(config.groups_kept, dim=-1).indices
    dropped = torch.ones_like(group_scores, dtype=torch.bool).scatter_(1, kept, False)
    return grouped.masked_fill(dropped[:, :, None], float("-inf")).flatten(1)


def group_by_expert(experts: Tensor, count: int) -> Groups:
    """Sort the pairs of tokens and experts by expert. experts: int64 [N, K], below `count`."""
    chosen, order = experts.flatten().sort(stable=True)
    ends = torch.searchsorted(chosen, torch.arange(count, device=chosen.device), right=True, out_int32=True)
    if not chosen.is_cpu:
        return Groups(order, ends, None)
    stops: list[int] = ends.tolist()
    starts = [0, *stops[:-1]]
    used = ((expert, first, end) for expert, (first, end) in enumerate(zip(starts, stops, strict=True)))
    return Groups(order, ends, [span for span in used if span[1] < span[2]])
