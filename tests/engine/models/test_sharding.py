"""The parts of a model compute together what the whole model computes; here all ranks are threads of one process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from engine.attention.plain import LatentPlainAttention, PlainAttention
from engine.executor.runner import Runner
from engine.models.loader import load_config, load_model
from engine.models.packed import pack
from engine.models.sharding import Shard, check_division, load_shard, load_vocabulary
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.forward import PAGE_SIZE, sequence_of
from tests.engine.models.test_families import DEEPSEEK, QWEN3_EXPERTS, transformers_logits
from tests.engine.steps import batch_of

TOKENS = np.random.default_rng(1).integers(0, VOCAB, 150)
SHAPES = {
    "llama": {},
    "llama with biases": {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False},
    "llama, odd vocabulary": {"vocab_size": VOCAB + 1},
    "qwen 2.5": {"family": "qwen2"},
    "qwen 3, one key head": {"family": "qwen3", "head_dim": 32, "num_key_value_heads": 1},
    "as many key heads": {"num_key_value_heads": 4},
    "mixtral": {"family": "mixtral", "num_local_experts": 5, "initializer_range": 0.3},
    "qwen 3, some layers with experts": {"family": "qwen3_moe", **QWEN3_EXPERTS, "mlp_only_layers": [0]},
    "deepseek 2 lite": {"family": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek 3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
}


class ThreadGroup:
    """The slow twin of `RankGroup`: ranks are threads that exchange tensors through a list."""

    def __init__(self, shard, slots, barrier):
        self.shard = shard
        self.slots = slots
        self.barrier = barrier

    def exchange(self, tensor):
        self.slots[self.shard.rank] = tensor.clone()
        self.barrier.wait()
        tensors = list(self.slots)
        self.barrier.wait()
        return tensors

    def sum(self, tensor):
        return torch.stack(self.exchange(tensor)).sum(0)

    def gather(self, tensor):
        tensors = self.exchange(tensor)
        return tensors if self.shard.rank == 0 else []


def divided_logits(folder, count, attention, tokens=TOKENS):
    """Logits after every token on rank 0 of a divided model."""
    slots, barrier = [None] * count, threading.Barrier(count, timeout=60)

    def run(rank):
        model = pack(load_shard(folder, Shard(rank, count)))
        model.connect(load_config(folder), ThreadGroup(Shard(rank, count), slots, barrier))
        runner = Runner(model, attention(model.part, 16, PAGE_SIZE, torch.float32, "cpu"))
        return runner.forward(batch_of([sequence_of(tokens[:1], range(16), draft=tokens[1:])], PAGE_SIZE))

    with ThreadPoolExecutor(count) as pool:
        return next(pool.map(run, range(count)))


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_logits_of_a_divided_model_equal_those_of_transformers(tmp_path, shape):
    """Models with latent attention run both the absorbed and the expanded form."""
    reference = make_folder(tmp_path, vary=0.3, **{"initializer_range": 0.1, **shape})
    expected = transformers_logits(reference, torch.from_numpy(TOKENS))
    attentions = (PlainAttention, PlainAttention if load_config(tmp_path).latent is None else LatentPlainAttention)
    for count, attention in zip((2, 4), attentions, strict=True):
        got = divided_logits(tmp_path, count, attention)
        assert got.shape == expected.shape
        assert (got - expected).abs().max() < 1e-4


def test_no_rank_has_more_than_its_part(tmp_path):
    make_folder(tmp_path)
    whole = load_model(tmp_path)
    tokens = [len(load_shard(tmp_path, Shard(rank, 4)).embedding.weight) for rank in range(4)]
    assert sum(tokens) == whole.config.vocab_size
    part = load_shard(tmp_path, Shard(1, 2)).layers[0]
    own = whole.layers[0]
    assert torch.equal(part.feed_forward.down_proj.weight, own.feed_forward.down_proj.weight[:, 48:])
    assert torch.equal(part.attention.o_proj.weight, own.attention.o_proj.weight[:, 32:])
    assert part.attention.qkv_proj.weight.shape == (64, 64)
    assert part.feed_forward.gate_up_proj.weight.shape == (96, 64)


def test_the_vocabulary_is_loaded_without_layers(model_folder):
    whole, part = load_model(model_folder), load_vocabulary(model_folder)
    hidden = torch.randn(3, whole.config.hidden_size)
    assert torch.equal(part.logits(hidden), whole.logits(hidden))
    assert torch.equal(part.embedding.weight, whole.embedding.weight)
    assert not len(part.layers)


@pytest.mark.parametrize(
    ("count", "shape", "reason"),
    [
        (4, {"family": "qwen3_moe", **QWEN3_EXPERTS, "moe_intermediate_size": 42}, "moe_intermediate_size, 42"),
        (3, {}, "does not divide the model's num_heads, 4"),
        (4, {"intermediate_size": 98}, "does not divide the model's intermediate_size, 98"),
        (4, {"hidden_size": 96, "num_attention_heads": 12, "num_key_value_heads": 6}, "kv_heads, 6, nor is"),
    ],
)
def test_models_that_cannot_be_divided_are_refused(tmp_path, count, shape, reason):
    make_folder(tmp_path, **shape)
    with pytest.raises(UserError, match=reason):
        check_division(load_config(tmp_path), count)
