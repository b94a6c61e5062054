"""Heads equal obvious twins that compute the same network from the tensors of the published files."""

import shutil
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from engine.models.heads.eagle3 import Eagle3Style
from engine.models.heads.formats import check_head, load_head, save_head
from engine.models.loader import load_model
from tests.engine.conftest import make_folder
from tests.engine.forward import DenseAttention
from tests.engine.models.heads import samples


class Twin:
    """Common parts: `files` are the head's tensors as they were saved, `target` the target's, `fields` the config."""

    def __init__(self, files, fields, target):
        self.files, self.fields, self.target = files, fields, target

    def target_states(self, hidden):
        return self.norm(hidden[:, 0], self.target["model.norm.weight"])

    def norm(self, x, weight):
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + self.fields["rms_norm_eps"]))

    def linear(self, x, name):
        result = x @ self.files[f"{name}.weight"].T
        return result + self.files[f"{name}.bias"] if f"{name}.bias" in self.files else result

    def embed(self, tokens):
        return self.files.get("embed_tokens.weight", self.target["model.embed_tokens.weight"])[tokens]

    def project(self, x):
        own = self.files.get("lm_head.weight", self.target.get("lm_head.weight"))
        return x @ (self.target["model.embed_tokens.weight"] if own is None else own).T

    def heads(self, x, name):
        """[T, heads * size] -> [heads, T, size], normalized if the checkpoint has such a norm."""
        split = self.linear(x, name).view(len(x), -1, self.fields["head_dim"])
        norm = name.replace("_proj", "_norm") + ".weight"
        if norm in self.files:
            split = self.norm(split, self.files[norm])
        return split.transpose(0, 1)

    def rotate(self, x):
        half = x.shape[-1] // 2
        theta = self.fields["rope_parameters"]["rope_theta"]
        angles = torch.arange(x.shape[1])[:, None] * theta ** -(torch.arange(half) / half)
        left, right = x[..., :half], x[..., half:]
        return torch.cat((left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()), -1)

    def attention(self, x, block):
        query, key, value = (self.heads(x, f"{block}self_attn.{name}_proj") for name in "qkv")
        share = len(query) // len(key)
        key, value = (each.repeat_interleave(share, dim=0) for each in (self.rotate(key), value))
        scores = self.rotate(query) @ key.transpose(1, 2) / query.shape[-1] ** 0.5
        mask = torch.ones(len(x), len(x)).triu(1).bool()
        mixed = scores.masked_fill(mask, float("-inf")).softmax(-1) @ value
        return self.linear(mixed.transpose(0, 1).flatten(1), f"{block}self_attn.o_proj")

    def mlp(self, x, block):
        gate, up = (self.linear(x, f"{block}mlp.{name}_proj") for name in ("gate", "up"))
        return self.linear(F.silu(gate) * up, f"{block}mlp.down_proj")

    def layer(self, x, block):
        norm = self.files.get(f"{block}input_layernorm.weight")
        x = x + self.attention(x if norm is None else self.norm(x, norm), block)
        return x + self.mlp(self.norm(x, self.files[f"{block}post_attention_layernorm.weight"]), block)


class Mtp(Twin):
    """DeepSeek-V3, section 2.2, with MiMo's names; the normalized output is the next state."""

    zeroes_first = True
    """Whether the first embedding is replaced with zeros, as by all but Qwen."""

    def run(self, tokens, states):
        prefix = samples.MIMO
        embeddings = self.embed(tokens)
        if self.zeroes_first:
            embeddings[0] = 0
        pair = (
            self.norm(states, self.files[f"{prefix}hidden_layernorm.weight"]),
            self.norm(embeddings, self.files[f"{prefix}token_layernorm.weight"]),
        )
        hidden = self.layer(self.linear(torch.cat(pair, -1), f"{prefix}input_proj"), prefix)
        hidden = self.norm(hidden, self.files[f"{prefix}final_layernorm.weight"])
        return self.project(hidden), hidden


class Eagle(Twin):
    """EAGLE: the output of the layer is the next state, and enters the target's output projection as it is."""

    def run(self, tokens, states):
        x = self.linear(torch.cat((self.embed(tokens), states), -1), "fc")
        x = self.layer(x, "layers.0.")
        return self.project(x), x


class Eagle3(Twin):
    """EAGLE-3, with the options of the speculators library."""

    def target_states(self, hidden):
        fields = self.fields
        if fields.get("fc_norm"):
            norms = [self.files[f"fc_norm.{index}.weight"] for index in range(hidden.shape[1])]
            hidden = torch.stack([self.norm(hidden[:, index], norm) for index, norm in enumerate(norms)], dim=1)
        fused = hidden.flatten(1)
        if fields.get("norm_before_fc"):
            fused = self.norm(fused, self.files["input_norm.weight"])
        return self.linear(fused, "fc")

    def run(self, tokens, states):
        block = "midlayer."
        normalized = self.norm(states, self.files[f"{block}hidden_norm.weight"])
        residual = normalized if self.fields.get("norm_before_residual") else states
        pairs = torch.cat((self.norm(self.embed(tokens), self.files[f"{block}input_layernorm.weight"]), normalized), -1)
        x = residual + self.attention(pairs, block)
        x = x + self.mlp(self.norm(x, self.files[f"{block}post_attention_layernorm.weight"]), block)
        last = self.norm(x, self.files["norm.weight"])
        return self.project(last), last if self.fields.get("norm_output") else x


class Medusa(Twin):
    """Medusa-1: head i has its own residual blocks and projection."""

    def run(self, states):
        logits = []
        for index in range(self.fields["medusa_num_heads"]):
            x, blocks = states, self.fields["medusa_num_layers"]
            for block in range(blocks):
                x = x + F.silu(self.linear(x, f"{index}.{block}.linear"))
            logits.append(x @ self.files[f"{index}.{blocks}.weight"].T)
        return torch.stack(logits, dim=1)


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


STYLES = {
    "plain": Eagle3Style(),
    "norm_before_residual": Eagle3Style(norm_before_residual=True),
    "norm_before_fc": Eagle3Style(norm_before_fc=True),
    "fc_norm": Eagle3Style(fc_norm=True),
    "norm_output": Eagle3Style(norm_output=True),
    "all": Eagle3Style(norm_before_residual=True, fc_norm=True, norm_output=True),
}
SMALLER = {"hidden_size": 32, "head_dim": 8, "hidden_layers": (1, 2)}
AS_WRITTEN = shutil.copytree
CASES = {
    "mimo": ({}, AS_WRITTEN),
    "mimo, normalized queries and keys": ({"qk_norm": True}, AS_WRITTEN),
    "mimo, own shape": ({"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}, AS_WRITTEN),
    "mimo as deepseek": ({}, samples.as_deepseek),
    "mimo as deepseek, exported by sglang": ({}, partial(samples.as_deepseek, layer=0)),
    "mimo as qwen": ({"qk_norm": True}, samples.as_qwen),
    "eagle": ({}, AS_WRITTEN),
    "eagle, no bias, own embedding": ({"has_bias": False, "has_embedding": True}, AS_WRITTEN),
    "eagle, biases of queries": ({"qkv_bias": True}, AS_WRITTEN),
    "eagle3, smaller": (SMALLER, AS_WRITTEN),
}
for name, style in STYLES.items():
    CASES[f"eagle3, {name}"] = ({"style": style}, AS_WRITTEN)
    options = {"style": style, "qk_norm": True, "kept": None}
    CASES[f"eagle3 of speculators, {name}"] = (options, samples.as_speculators_eagle3)
KINDS = {"mimo": (samples.mtp, Mtp), "eagle": (samples.eagle, Eagle), "eagle3": (samples.eagle3, Eagle3)}
"""What makes a head, and its twin, by the first word of a case."""


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("case", CASES)
def test_a_published_head_computes_like_its_twin(tmp_path, target, target_folder, case, seed):
    """Compare a text with the target's states, then draft tokens with the head's own states.

    The loaded head also has the outputs of the one that was saved, to the last bit, but for Qwen's first embedding.
    """
    (make, twin_of), (options, rewrite) = KINDS[case.replace(",", "").split()[0]], CASES[case]
    saved = make(target, seed=seed, **options)
    save_head(saved, tmp_path / "own", dtype=torch.float32)
    rewrite(tmp_path / "own", folder := tmp_path / "published")
    check_head(make.__name__, folder, target.config)
    head = load_head(make.__name__, folder, target.config)
    head.attach(target)
    assert head.hidden_layers == saved.hidden_layers
    twin = twin_of(*samples.read(tmp_path / "own"), samples.read(target_folder)[0])
    twin.zeroes_first = rewrite is not samples.as_qwen
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TEXT, len(head.hidden_layers), target.config.hidden_size, generator=generator)
    tokens = torch.randint(0, target.config.vocab_size, (TEXT + DRAFT,), generator=generator)

    attend, positions = DenseAttention(), torch.arange(1, TEXT + DRAFT + 1)
    states, twin_states = head.target_states(hidden), twin.target_states(hidden)
    before = saved(tokens[:TEXT], saved.target_states(hidden), positions[:TEXT], DenseAttention())
    first = 0
    for end in range(TEXT, TEXT + DRAFT + 1):
        output = head(tokens[first:end], states, positions[first:end], attend)
        if not first and rewrite is not samples.as_qwen:
            assert torch.equal(head.target_logits(output.hidden), saved.target_logits(before.hidden))
        logits, outputs = twin.run(tokens[:end], twin_states)
        torch.testing.assert_close(head.logits(output.hidden), logits[first:], **TOLERANCE)
        torch.testing.assert_close(output.state, outputs[first:], **TOLERANCE)
        states, twin_states = output.state[-1:], torch.cat((twin_states, outputs[-1:]))
        first = end


@pytest.mark.parametrize("options", [{}, {"blocks": 2}, {"has_bias": False}], ids=str)
def test_medusa_computes_like_its_twin(tmp_path, target, target_folder, options):
    saved = samples.medusa(target, **options)
    save_head(saved, tmp_path, dtype=torch.float32)
    heads = load_head("medusa", tmp_path, target.config)
    heads.attach(target)
    files, fields = samples.read(tmp_path, "medusa_lm_head.safetensors")
    twin = Medusa(files, {**fields, "rms_norm_eps": target.config.rms_norm_eps}, samples.read(target_folder)[0])
    hidden = torch.randn(5, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = twin.run(twin.target_states(hidden))
    found = heads(heads.target_states(hidden))
    torch.testing.assert_close(found, expected, **TOLERANCE)
    assert torch.equal(found, saved(saved.target_states(hidden)))
