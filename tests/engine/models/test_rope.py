"""Rotations compared with those of transformers, up to positions where rounding changes the angle."""

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from engine.models.decoder import Decoder
from engine.models.hf_config import config_from_hf

LONG = 131_072


def rope(kind, theta, factor, original=None, **more):
    """Fields of `rope_parameters`."""
    fields = {"rope_type": kind, "rope_theta": theta, "factor": factor, "original_max_position_embeddings": original}
    return {name: value for name, value in fields.items() if value is not None or name == "factor"} | more


# As published: Llama 3.1 and 3.2, Qwen2.5 with its recommended scaling, DeepSeek's variant, and unusual values.
LLAMA3_RANGE = {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
UNUSUAL = {"beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.2, "truncate": False}
PUBLISHED = {
    "llama 3.1": rope("llama3", 500_000.0, 8.0, 8192, **LLAMA3_RANGE),
    "llama 3.2": rope("llama3", 500_000.0, 32.0, 8192, **LLAMA3_RANGE),
    "qwen 2.5": rope("yarn", 1_000_000.0, 4.0, 32_768),
    "yarn as DeepSeek has it": rope("yarn", 10_000.0, 40.0, 4096, mscale=0.707, mscale_all_dim=0.5),
    "yarn with all its numbers": rope("yarn", 150_000.0, 32.0, 4096, **UNUSUAL),
    "yarn whose factor is the ratio of the contexts": rope("yarn", 10_000.0, None, 16_384),
    "linear": rope("linear", 10_000.0, 8.0),
    "default": {"rope_type": "default", "rope_theta": 1_000_000.0},
}


def fields_of(rope, head_dim, max_positions):
    sizes = {"vocab_size": 10, "hidden_size": 2 * head_dim, "intermediate_size": 8, "num_hidden_layers": 1}
    sizes |= {"num_attention_heads": 2, "max_position_embeddings": max_positions}
    return {"architectures": ["LlamaForCausalLM"], **sizes, "rope_parameters": dict(rope)}


def turns_of(config, positions):
    """Cosines and sines, float32 [N, 1, head_dim] each."""
    return config.rope.turns(positions, config.rope.frequencies(config.head_dim).repeat(2))


def both_tables(rope, head_dim, max_positions, first=0):
    """Return cosines and sines of the positions from `first` on: ours, and those of transformers."""
    fields, positions = fields_of(rope, head_dim, max_positions), torch.arange(first, max_positions)
    ours = [table[:, 0] for table in turns_of(config_from_hf(fields), positions)]
    theirs = LlamaRotaryEmbedding(LlamaConfig(**fields))(torch.zeros(1), positions[None])
    return ours, [table[0] for table in theirs]


@pytest.mark.parametrize("rope", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_long_positions_equal_those_of_transformers(rope):
    for ours, theirs in zip(*both_tables(rope, 64, LONG, LONG - 8192), strict=True):
        assert ours.shape == theirs.shape
        # One additional rounding of a frequency would cause an error of 0.004 radians here.
        assert (ours - theirs).abs().max() < 1e-6


@pytest.mark.parametrize("rope", PUBLISHED.values(), ids=PUBLISHED.keys())
def test_rotation_does_not_depend_on_the_step_and_takes_no_memory(rope):
    """Bitwise, since cached keys were rotated in other steps than the queries that use them."""
    config = config_from_hf(fields_of(rope, 64, LONG))
    assert sum(buffer.numel() for buffer in Decoder(config).buffers()) == 64
    positions = torch.cat((torch.arange(300), torch.randint(LONG, (300,), generator=torch.Generator().manual_seed(0))))
    whole = turns_of(config, positions)
    for count in (1, 2, 7, 64):
        parts = [turns_of(config, part) for part in positions.split(count)]
        for table, pieces in zip(whole, zip(*parts, strict=True), strict=True):
            assert torch.equal(table, torch.cat(pieces))


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
