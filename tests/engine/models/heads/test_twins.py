"""Heads of published files compute the same as slow twins written from the papers."""

import pytest
import torch

from engine.models.heads.eagle3 import Eagle3Style
from engine.models.heads.formats import load_head, save_head
from engine.models.loader import load_model
from tests.engine.conftest import make_folder
from tests.engine.models.heads import published, samples, twins

TEXT = 12
"""Pairs with states of the target."""
DRAFT = 3
"""Pairs with states of the head."""
TOLERANCE = {"atol": 1e-4, "rtol": 1e-4}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "varied"
    make_folder(folder, vary=0.3)
    return folder


@pytest.fixture(scope="module")
def target(target_folder):
    return load_model(target_folder)


def convert(rewrite, **options):
    def make(folder, to):
        rewrite(folder, to, **options)
        return to

    return make


def same(folder, _to):
    return folder


STYLES = {
    "plain": Eagle3Style(),
    "norm_before_residual": Eagle3Style(norm_before_residual=True),
    "norm_before_fc": Eagle3Style(norm_before_fc=True),
    "fc_norm": Eagle3Style(fc_norm=True),
    "norm_output": Eagle3Style(norm_output=True),
    "all": Eagle3Style(norm_before_residual=True, fc_norm=True, norm_output=True),
}
CASES = {
    "mimo": (samples.mtp, {}, same, twins.Mimo),
    "mimo, normalized queries and keys": (samples.mtp, {"qk_norm": True}, same, twins.Mimo),
    "mimo, own shape": (samples.mtp, {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}, same, twins.Mimo),
    "deepseek": (samples.mtp, {}, convert(published.as_deepseek), twins.DeepSeek),
    "deepseek, exported by sglang": (samples.mtp, {}, convert(published.as_deepseek, layer=0), twins.DeepSeek),
    "qwen": (samples.mtp, {"qk_norm": True}, convert(published.as_qwen), twins.Qwen),
    "eagle": (samples.eagle, {}, same, twins.Eagle),
    "eagle, no bias, own embedding": (samples.eagle, {"has_bias": False, "has_embedding": True}, same, twins.Eagle),
    "eagle, biases of queries": (samples.eagle, {"qkv_bias": True}, same, twins.Eagle),
    **{f"eagle3, {name}": (samples.eagle3, {"style": style}, same, twins.Eagle3) for name, style in STYLES.items()},
    **{
        f"eagle3 of speculators, {name}": (
            samples.eagle3,
            {"style": style, "qk_norm": True, "kept": None},
            convert(published.as_speculators_eagle3),
            twins.Eagle3,
        )
        for name, style in STYLES.items()
    },
    "eagle3, smaller": (samples.eagle3, {"hidden_size": 32, "hidden_layers": (1, 2)}, same, twins.Eagle3),
}


class DenseAttention:
    """Attention of each row to all rows before it, over several calls."""

    def __init__(self):
        self.keys, self.values = {}, {}

    def __call__(self, layer, query, key, value):
        before = self.keys.get(layer, key[:0]), self.values.get(layer, value[:0])
        keys, values = torch.cat((before[0], key)), torch.cat((before[1], value))
        self.keys[layer], self.values[layer] = keys, values
        share = query.shape[1] // keys.shape[1]
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(share, 1)) / query.shape[-1] ** 0.5
        rows = torch.arange(len(keys) - len(query), len(keys))[:, None]
        scores = scores.masked_fill(torch.arange(len(keys)) > rows, float("-inf"))
        return torch.einsum("hqk,khd->qhd", scores.softmax(-1), values.repeat_interleave(share, 1))


def kind_of(make):
    return make.__name__


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize(("make", "options", "rewrite", "twin_of"), CASES.values(), ids=CASES.keys())
def test_a_published_head_computes_like_its_twin(
    tmp_path, target, target_folder, make, options, rewrite, twin_of, seed
):
    """Compare a text with the target's states, then draft tokens with the head's own states."""
    save_head(make(target, seed=seed, **options), tmp_path / "own", dtype=torch.float32)
    folder = rewrite(tmp_path / "own", tmp_path / "other")
    head = load_head(kind_of(make), folder, target.config)
    head.attach(target)
    twin = twin_of(*published.read(folder), published.read(target_folder)[0])
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TEXT, len(head.hidden_layers), target.config.hidden_size, generator=generator)
    tokens = torch.randint(0, target.config.vocab_size, (TEXT + DRAFT,), generator=generator)

    attend, positions = DenseAttention(), torch.arange(1, TEXT + DRAFT + 1)
    states, twin_states = head.target_states(hidden), twin.target_states(hidden)
    first = 0
    for end in range(TEXT, TEXT + DRAFT + 1):
        output = head(tokens[first:end], states, positions[first:end], attend)
        logits, outputs = twin.run(tokens[:end], twin_states)
        torch.testing.assert_close(head.logits(output.hidden), logits[first:], **TOLERANCE)
        torch.testing.assert_close(output.state, outputs[first:], **TOLERANCE)
        states, twin_states = output.state[-1:], torch.cat((twin_states, outputs[-1:]))
        first = end


@pytest.mark.parametrize("blocks", [1, 2])
def test_medusa_computes_like_its_twin(tmp_path, target, target_folder, blocks):
    save_head(samples.medusa(target, blocks=blocks), tmp_path, dtype=torch.float32)
    heads = load_head("medusa", tmp_path, target.config)
    heads.attach(target)
    twin = twins.Medusa(
        published.read(tmp_path, "medusa_lm_head.safetensors")[0],
        {**published.read(tmp_path, "medusa_lm_head.safetensors")[1], "rms_norm_eps": target.config.rms_norm_eps},
        published.read(target_folder)[0],
    )
    hidden = torch.randn(5, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = twin.run(twin.target_states(hidden))
    torch.testing.assert_close(heads(heads.target_states(hidden)), expected, **TOLERANCE)
