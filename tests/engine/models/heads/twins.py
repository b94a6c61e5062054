"""Slow twins of draft heads, written from the papers and the authors' code, on the tensors of published files.

Each computes whole texts at once with dense attention. `states` and `tokens` are those of pairs (state of the position
before, token), of which the first has position 0, as in the published networks.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F


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
