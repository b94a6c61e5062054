"""Heads that were saved load unchanged, with the names and fields of the published formats."""

import pytest
import torch

from engine.models.heads.eagle3 import Eagle3Style
from engine.models.heads.formats import check_head, load_head, save_head
from tests.engine.models.heads import samples

HEADS = {
    "mtp": ("mtp", samples.mtp, {}),
    "mtp, reduced vocabulary": ("mtp", samples.mtp, {"kept": 120}),
    "mtp, normalised queries and keys": ("mtp", samples.mtp, {"qk_norm": True}),
    "eagle": ("eagle", samples.eagle, {}),
    "eagle, no bias": ("eagle", samples.eagle, {"has_bias": False}),
    "eagle, two layers, embedding": ("eagle", samples.eagle, {"layers": 2, "has_embedding": True}),
    "eagle, biases of queries": ("eagle", samples.eagle, {"qkv_bias": True}),
    "eagle3": ("eagle3", samples.eagle3, {}),
    "eagle3, full vocabulary": ("eagle3", samples.eagle3, {"kept": None}),
    "eagle3, smaller": ("eagle3", samples.eagle3, {"hidden_size": 32, "head_dim": 8, "has_embedding": True}),
    "eagle3, normalised queries": ("eagle3", samples.eagle3, {"qk_norm": True}),
    "eagle3, norms": (
        "eagle3",
        samples.eagle3,
        {"style": Eagle3Style(norm_before_residual=True, fc_norm=True, norm_output=True), "hidden_layers": (1, 2)},
    ),
    "eagle3, one norm": ("eagle3", samples.eagle3, {"style": Eagle3Style(norm_before_fc=True)}),
    "medusa": ("medusa", samples.medusa, {}),
    "medusa, two blocks": ("medusa", samples.medusa, {"blocks": 2}),
}


def outputs(head, target, kind):
    """Outputs of a head for 7 random pairs without attention, and its logits."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, len(head.hidden_layers), target.config.hidden_size, generator=generator)
    states = head.target_states(hidden)
    if kind == "medusa":
        return [head(states)]
    tokens = torch.randint(0, target.config.vocab_size, (7,), generator=generator)
    ratio = head.config.num_heads // head.config.num_kv_heads
    output = head(tokens, states, torch.arange(1, 8), lambda *given: given[3].repeat_interleave(ratio, dim=1))
    return [output.hidden, output.state, head.logits(output.hidden)]


@pytest.mark.parametrize(("kind", "make", "options"), HEADS.values(), ids=HEADS.keys())
def test_a_saved_head_loads_unchanged(tmp_path, model, kind, make, options):
    head = make(model, **options)
    save_head(head, tmp_path, dtype=torch.float32)
    check_head(kind, tmp_path, model.config)
    again = load_head(kind, tmp_path, model.config)
    again.attach(model)
    for left, right in zip(outputs(head, model, kind), outputs(again, model, kind), strict=True):
        assert torch.equal(left, right)
    assert head.hidden_layers == again.hidden_layers
    ids = getattr(head, "draft_vocabulary", None), getattr(again, "draft_vocabulary", None)
    assert ids[0] is ids[1] or torch.equal(*ids)
