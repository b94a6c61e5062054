"""Heads equal obvious twins that compute the same network from the tensors of the published files."""

import pytest
import torch
import torch.nn.functional as F

from engine.models.heads.eagle3 import Eagle3Style
from engine.models.heads.formats import load_head, save_head
from engine.models.loader import load_model
from tests.engine.conftest import make_folder
from tests.engine.models.heads import samples


class Twin:
    """Common parts: `files` are the head's tensors, `fields` its configuration, `target` the target's tensors."""

    def __init__(self, files, fields, target):
        self.files, self.target = files, target
        self.fields = {**fields, **fields.get("transformer_layer_config", {})}

    def norm(self, x, weight):
        variance = x.pow(2).mean(-1, keepdim=True)
        return weight * (x * torch.rsqrt(variance + self.fields["rms_norm_eps"]))

    def final_norm_of_target(self, x):
        return self.norm(x, self.target["model.norm.weight"])

    def linear(self, x, name):
        result = x @ self.files[f"{name}.weight"].T
        return result + self.files[f"{name}.bias"] if f"{name}.bias" in self.files else result

    def embedding_of_target(self, tokens):
        return self.target["model.embed_tokens.weight"][tokens]

    def projection_of_target(self, x):
        return x @ self.target.get("lm_head.weight", self.target["model.embed_tokens.weight"]).T

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


class Mimo(Twin):
    """MiMo: hidden state first, first embedding zero; the normalized output is the next state."""

    def target_states(self, hidden):
        return self.final_norm_of_target(hidden[:, 0])

    def run(self, tokens, states):
        prefix = "model.mtp_layers.0."
        embeddings = self.embedding_of_target(tokens)
        embeddings[0] = 0
        pair = (
            self.norm(states, self.files[f"{prefix}hidden_layernorm.weight"]),
            self.norm(embeddings, self.files[f"{prefix}token_layernorm.weight"]),
        )
        hidden = self.layer(self.linear(torch.cat(pair, -1), f"{prefix}input_proj"), prefix)
        hidden = self.norm(hidden, self.files[f"{prefix}final_layernorm.weight"])
        return self.logits(hidden), hidden

    def logits(self, hidden):
        return self.projection_of_target(hidden)


class DeepSeek(Mimo):
    """DeepSeek-V3, section 2.2: embedding first."""

    def run(self, tokens, states):
        prefix = next(name for name in self.files if name.endswith("eh_proj.weight")).removesuffix("eh_proj.weight")
        embeddings = self.embedding_of_target(tokens)
        embeddings[0] = 0
        pair = (
            self.norm(embeddings, self.files[f"{prefix}enorm.weight"]),
            self.norm(states, self.files[f"{prefix}hnorm.weight"]),
        )
        hidden = self.layer(self.linear(torch.cat(pair, -1), f"{prefix}eh_proj"), prefix)
        hidden = self.norm(hidden, self.files[f"{prefix}shared_head.norm.weight"])
        return self.logits(hidden), hidden


class Qwen(Mimo):
    """Qwen: embedding first, no embedding is zero."""

    def run(self, tokens, states):
        pair = (
            self.norm(self.embedding_of_target(tokens), self.files["mtp.pre_fc_norm_embedding.weight"]),
            self.norm(states, self.files["mtp.pre_fc_norm_hidden.weight"]),
        )
        hidden = self.layer(self.linear(torch.cat(pair, -1), "mtp.fc"), "mtp.layers.0.")
        hidden = self.norm(hidden, self.files["mtp.norm.weight"])
        return self.logits(hidden), hidden


class Eagle(Twin):
    """EAGLE: the output of the layer is the next state, and enters the target's output projection as it is."""

    def target_states(self, hidden):
        return self.final_norm_of_target(hidden[:, 0])

    def run(self, tokens, states):
        own = self.files.get("embed_tokens.weight")
        embeddings = self.embedding_of_target(tokens) if own is None else own[tokens]
        x = self.linear(torch.cat((embeddings, states), -1), "fc")
        x = self.layer(x, "layers.0.")
        return self.projection_of_target(x), x


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
        block = "midlayer." if "midlayer.hidden_norm.weight" in self.files else "layers.0."
        own = self.files.get("embed_tokens.weight")
        embeddings = self.embedding_of_target(tokens) if own is None else own[tokens]
        normalized = self.norm(states, self.files[f"{block}hidden_norm.weight"])
        residual = normalized if self.fields.get("norm_before_residual") else states
        pairs = torch.cat((self.norm(embeddings, self.files[f"{block}input_layernorm.weight"]), normalized), -1)
        x = residual + self.attention(pairs, block)
        x = x + self.mlp(self.norm(x, self.files[f"{block}post_attention_layernorm.weight"]), block)
        last = self.norm(x, self.files["norm.weight"])
        own_projection = self.files.get("lm_head.weight")
        logits = self.projection_of_target(last) if own_projection is None else last @ own_projection.T
        return logits, last if self.fields.get("norm_output") else x


class Medusa(Twin):
    """Medusa-1: head i has its own residual blocks and projection."""

    def target_states(self, hidden):
        return self.final_norm_of_target(hidden[:, 0])

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
    "mimo": (samples.mtp, {}, same, Mimo),
    "mimo, normalized queries and keys": (samples.mtp, {"qk_norm": True}, same, Mimo),
    "mimo, own shape": (samples.mtp, {"num_heads": 2, "num_kv_heads": 1, "intermediate_size": 80}, same, Mimo),
    "deepseek": (samples.mtp, {}, convert(samples.as_deepseek), DeepSeek),
    "deepseek, exported by sglang": (samples.mtp, {}, convert(samples.as_deepseek, layer=0), DeepSeek),
    "qwen": (samples.mtp, {"qk_norm": True}, convert(samples.as_qwen), Qwen),
    "eagle": (samples.eagle, {}, same, Eagle),
    "eagle, no bias, own embedding": (samples.eagle, {"has_bias": False, "has_embedding": True}, same, Eagle),
    "eagle, biases of queries": (samples.eagle, {"qkv_bias": True}, same, Eagle),
    **{f"eagle3, {name}": (samples.eagle3, {"style": style}, same, Eagle3) for name, style in STYLES.items()},
    **{
        f"eagle3 of speculators, {name}": (
            samples.eagle3,
            {"style": style, "qk_norm": True, "kept": None},
            convert(samples.as_speculators_eagle3),
            Eagle3,
        )
        for name, style in STYLES.items()
    },
    "eagle3, smaller": (samples.eagle3, {"hidden_size": 32, "hidden_layers": (1, 2)}, same, Eagle3),
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
    twin = twin_of(*samples.read(folder), samples.read(target_folder)[0])
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
    twin = Medusa(
        samples.read(tmp_path, "medusa_lm_head.safetensors")[0],
        {**samples.read(tmp_path, "medusa_lm_head.safetensors")[1], "rms_norm_eps": target.config.rms_norm_eps},
        samples.read(target_folder)[0],
    )
    hidden = torch.randn(5, 1, target.config.hidden_size, generator=torch.Generator().manual_seed(3))
    expected = twin.run(twin.target_states(hidden))
    torch.testing.assert_close(heads(heads.target_states(hidden)), expected, **TOLERANCE)
