"""Routing and the grouped product equal transformers' modules and obvious twins; unsupported dtypes are refused."""

from copy import deepcopy

import pytest
import torch

from engine.models.config import ExpertsConfig
from engine.models.experts import Experts, MixtureOfExperts, Routes, group_by_expert, route
from engine.models.layers import PLAIN
from engine.models.loader import load_model
from engine.models.packed import Int8Linear, pack, replace_linears
from ssd.errors import UserError
from tests.engine.conftest import make_folder

HIDDEN = 64


def naive_route(logits, correction, config):
    """Choose the experts of one token by sorting lists."""
    scores = (logits.sigmoid() if config.scores == "sigmoid" else logits.softmax(-1)).tolist()
    ranks = [score + term for score, term in zip(scores, correction.tolist(), strict=True)]
    size = config.count // config.groups
    groups = [list(range(first, first + size)) for first in range(0, config.count, size)]
    groups.sort(key=lambda group: -sum(sorted((ranks[each] for each in group), reverse=True)[: config.group_members]))
    open_experts = [each for group in groups[: config.groups_kept] for each in group]
    chosen = sorted(open_experts, key=lambda each: -ranks[each])[: config.per_token]
    total = sum(scores[each] for each in chosen) if config.is_normalized else 1
    return chosen, [scores[each] / total * config.scaling for each in chosen]


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"is_normalized": False},
        {"scores": "sigmoid", "scaling": 2.5, "groups": 4, "groups_kept": 2, "group_members": 2},
        {"groups": 4, "groups_kept": 3, "scaling": 16.0, "is_normalized": False},
    ],
    ids=["softmax", "weights are probabilities", "DeepSeek-V3", "DeepSeek-V2"],
)
def test_routes_are_those_of_sorted_lists(settings):
    config = ExpertsConfig(16, 3, 8, (0,), **settings)
    torch.manual_seed(1)
    logits, correction = torch.randn(50, 16), 0.3 * torch.randn(16)
    experts, weights = route(logits, correction, config)
    for token in range(50):
        chosen, factors = naive_route(logits[token], correction, config)
        assert experts[token].tolist() == chosen
        torch.testing.assert_close(weights[token], torch.tensor(factors))


def naive_experts(experts, hidden, routes):
    """One token and one expert at a time."""
    rows = []
    for state, chosen, weights in zip(hidden, *routes, strict=True):
        outputs = []
        for expert, weight in zip(chosen.tolist(), weights, strict=True):
            gate, up = (experts.gate_up_proj.weight[expert] @ state).chunk(2)
            outputs.append(weight * (experts.down_proj.weight[expert] @ (torch.nn.functional.silu(gate) * up)))
        rows.append(sum(outputs))
    return torch.stack(rows)


@pytest.mark.parametrize("tokens", [1, 3, 40])
def test_the_grouped_product_equals_a_loop_over_tokens(tokens):
    torch.manual_seed(3)
    config = ExpertsConfig(12, 3, 24, (0,))
    experts = Experts(HIDDEN, config).requires_grad_(False)
    hidden = torch.randn(tokens, HIDDEN)
    # The last three experts are never used.
    routes = Routes(torch.rand(tokens, 9).topk(3).indices, torch.rand(tokens, 3))
    expected = naive_experts(experts, hidden, routes)
    torch.testing.assert_close(experts(hidden, routes, PLAIN), expected, atol=1e-4, rtol=1e-4)
    replace_linears(rounded := deepcopy(experts), Int8Linear)
    assert torch.cosine_similarity(rounded(hidden, routes, PLAIN), expected, dim=-1).min() > 0.999
    pack(experts)
    torch.testing.assert_close(experts(hidden, routes, PLAIN), expected, atol=1e-4, rtol=1e-4)


def test_each_expert_in_use_is_one_group():
    groups = group_by_expert(torch.tensor([[4, 0], [1, 4], [4, 1]]), 6)
    assert groups.spans == [(0, 0, 1), (1, 1, 3), (4, 3, 6)]
    assert groups.order.tolist() == [1, 2, 5, 0, 3, 4]
    assert groups.ends.tolist() == [1, 3, 3, 3, 6, 6]


def test_routers_stay_in_float32():
    layer = MixtureOfExperts(HIDDEN, ExpertsConfig(6, 2, 24, (0,), has_correction=True)).to(torch.bfloat16)
    assert {parameter.dtype for parameter in layer.router.parameters()} == {torch.float32}
    assert layer.experts.down_proj.weight.dtype == torch.bfloat16
    assert layer(torch.randn(3, HIDDEN, dtype=torch.bfloat16), PLAIN).dtype == torch.bfloat16


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"count": 0}, "count of experts must be from 1"),
        ({"groups": 5}, "cannot choose 1 of 5 groups"),
        ({"groups": 4, "groups_kept": 5}, "cannot choose 5 of 4 groups"),
        ({"groups": 4}, "a token cannot use 3 experts of 1 groups of 2"),
        ({"per_token": 2, "groups": 4, "group_members": 3}, "groups of 2 experts"),
    ],
)
def test_shapes_that_cannot_route_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        ExpertsConfig(**{"count": 8, "per_token": 3, "intermediate_size": 8, "layers": (0,), **settings})


def test_other_devices_need_bfloat16(tmp_path):
    make_folder(tmp_path, family="mixtral")
    with pytest.raises(UserError, match="runs on 'cuda' only as bfloat16, not float32; give --dtype bfloat16"):
        load_model(tmp_path, device="cuda")
