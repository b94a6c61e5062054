"""Rotations compared with those of transformers, up to positions where rounding changes the angle."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.decoder import Decoder
from engine.models.hf_config import config_from_hf
from engine.models.rope import rotate

LONG = 131_072

# As published: Llama 3.1 and 3.2, Qwen2.5 with its recommended scaling, DeepSeek's variant, and unusual values.
PUBLISHED = {
    "llama 3.1": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "llama 3.2": {
        "rope_type": "llama3",
        "rope_theta": 500_000.0,
        "factor": 32.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen 2.5": {
        "rope_type": "yarn",
        "rope_theta": 1_000_000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 32_768,
    },
    "yarn as DeepSeek has it": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 0.707,
        "mscale_all_dim": 0.5,
    },
    "yarn with all its numbers": {
        "rope_type": "yarn",
        "rope_theta": 150_000.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 16.0,
        "beta_slow": 2.0,
        "attention_factor": 1.2,
        "truncate": False,
    },
    "yarn whose factor is the ratio of the contexts": {
        "rope_type": "yarn",
        "rope_theta": 10_000.0,
        "factor": None,
        "original_max_position_embeddings": 16_384,
    },
    "linear": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 8.0},
    "default": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


def fields_of(rope, head_dim, max_positions):
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 10,
        "hidden_size": 2 * head_dim,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "max_position_embeddings": max_positions,
        "rope_parameters": dict(rope),
    }


def turns_of(config, positions):
    """Cosines and sines, float32 [N, 1, head_dim] each."""
    return config.rope.turns(positions, config.rope.frequencies(config.head_dim).repeat(2))


def both_tables(rope, head_dim, max_positions):
    """Return cosines and sines: ours, and those of transformers."""
    fields = fields_of(rope, head_dim, max_positions)
    config = config_from_hf(fields)
    ours = [table[:, 0] for table in turns_of(config, torch.arange(max_positions))]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))(torch.zeros(1), torch.arange(max_positions)[None])
    return ours, [table[0] for table in theirs]


@pytest.mark.parametrize("rope", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_long_positions_equal_those_of_transformers(rope):
    for ours, theirs in zip(*both_tables(rope, 64, LONG), strict=True):
        assert ours.shape == theirs.shape
        # One additional rounding of a frequency would cause an error of 0.004 radians here.
        assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("rope", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_rotation_does_not_depend_on_the_step(rope):
    """Bitwise, since cached keys were rotated in other steps than the queries that use them."""
    config = config_from_hf(fields_of(rope, 64, LONG))
    positions = torch.cat((torch.arange(300), torch.randint(LONG, (300,), generator=torch.Generator().manual_seed(0))))
    whole = turns_of(config, positions)
    for count in (1, 2, 7, 64):
        parts = [turns_of(config, part) for part in positions.split(count)]
        for table, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(table, torch.cat(pieces))


def test_a_long_context_takes_no_memory():
    config = config_from_hf(fields_of(PUBLISHED["llama 3.1"], 64, 1 << 30))
    assert sum(buffer.numel() for buffer in Decoder(config).buffers()) == 64


@settings(max_examples=100)
@given(st.data())
def test_scalings_equal_those_of_transformers(data):
    number = st.floats(1.0, 64.0)
    rope = {
        "rope_type": data.draw(st.sampled_from(["linear", "llama3", "yarn"])),
        "rope_theta": data.draw(st.floats(100.0, 1e6)),
        "factor": data.draw(number),
        "original_max_position_embeddings": data.draw(st.integers(16, 512)),
    }
    if rope["rope_type"] == "llama3":
        rope.update(low_freq_factor=data.draw(number), high_freq_factor=data.draw(number))
        assume(rope["high_freq_factor"] > rope["low_freq_factor"] + 0.1)
    if rope["rope_type"] == "yarn":
        rope.update(beta_fast=data.draw(st.floats(8.0, 64.0)), beta_slow=data.draw(st.floats(0.5, 4.0)))
    for ours, theirs in zip(*both_tables(rope, data.draw(st.sampled_from([8, 16, 64, 128])), 256), strict=True):
        assert (ours - theirs).abs().max() < 1e-4


def test_scores_depend_only_on_distances():
    """Moving a query and a key by the same number of tokens keeps their product."""
    config = config_from_hf(fields_of(PUBLISHED["llama 3.1"], 64, 4096))
    cos, sin = turns_of(config, torch.arange(4096))
    query, key = torch.randn(2, 1, 1, 64, generator=torch.Generator().manual_seed(0))

    def score(query_at, key_at):
        turned = rotate(query, cos[[query_at]], sin[[query_at]]), rotate(key, cos[[key_at]], sin[[key_at]])
        return float((turned[0] * turned[1]).sum())

    assert score(100, 37) == pytest.approx(score(4000, 3937), abs=1e-2)
    assert score(100, 37) != pytest.approx(score(100, 38), abs=1e-2)
