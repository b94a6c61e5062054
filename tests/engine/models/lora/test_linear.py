"""Logits of rows with different adapters equal those of models with merged weights."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from engine.attention.plain import PlainAttention
from engine.executor.runner import Runner
from engine.models.loader import load_config, load_model
from engine.models.lora.format import check_adapters
from engine.models.lora.linear import LARGEST_BATCHED
from engine.models.lora.pool import AdapterPool
from engine.models.packed import pack
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.lora_folders import KINDS, LATENT_KINDS, merged_model, write_adapter
from tests.engine.models.quantized.formats import FORMATS, quantize_folder
from tests.engine.models.test_families import DEEPSEEK, QWEN3_EXPERTS
from tests.engine.steps import Entry, batch_of
from tests.engine.tables import give_pages

PAGE_SIZE, PAGES = 16, 4
ADAPTERS = {
    "all": {"rank": 4},
    "attention": {"rank": 9, "kinds": ("q_proj", "v_proj"), "use_rslora": True},
    "feed-forward": {"rank": 1, "kinds": ("gate_proj", "down_proj"), "lora_alpha": 3},
    "patterns": {"rank": 2, "rank_pattern": {"k_proj": 7}, "alpha_pattern": {"o_proj": 1}, "layers": [1]},
}
"""Arguments of `write_adapter`."""
SHAPES = {
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
    "qwen 3, some layers with experts": {"family": "qwen3_moe", **QWEN3_EXPERTS, "mlp_only_layers": [0]},
    "deepseek 2 lite": {"family": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek 3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
}


def entries(lengths, names):
    """Prompts of random tokens with an adapter each."""
    rng = np.random.default_rng(7)
    found = []
    for index, (length, name) in enumerate(zip(lengths, names, strict=True)):
        prompt = rng.integers(0, VOCAB, length).astype(np.uint32)
        sequence = Sequence(index, Request(prompt, adapter=name), length + 1)
        give_pages(sequence, range(index * PAGES, (index + 1) * PAGES))
        found.append(Entry(sequence, 0, length))
    return found


def run(model, plans, pool=None):
    """Logits after each prompt."""
    attention = PlainAttention(model.config, 64, PAGE_SIZE, torch.float32, "cpu")
    return Runner(model, attention, adapters=pool).forward(batch_of(plans, PAGE_SIZE))


@pytest.fixture(scope="module", params=["llama", "qwen3", "qwen2"])
def folders(request, tmp_path_factory):
    """A model, its adapters, and the models with merged weights, by name."""
    folder = tmp_path_factory.mktemp(request.param)
    make_folder(folder, family=request.param, vary=0.1)
    merged = {None: load_model(folder)}
    for seed, (name, settings) in enumerate(ADAPTERS.items()):
        merged[name] = merged_model(folder, write_adapter(folder / name, folder, seed=seed, **settings))
    return folder, merged


def pool_of(model, folder, names=tuple(ADAPTERS)):
    pool = AdapterPool(model, check_adapters({name: folder / name for name in names}, load_config(folder)), len(names))
    for name in names:
        pool.prepare(name)
    pool.wait()
    assert pool.loaded == list(names)
    return pool


@pytest.mark.parametrize("packed", [False, True])
def test_rows_of_several_adapters_equal_merged_weights(folders, packed):
    folder, merged = folders
    model = load_model(folder)
    pool = pool_of(pack(model) if packed else model, folder)
    long = LARGEST_BATCHED + 9
    plans = entries(
        [5, 1, long, 2, 17, 1, 3], ["all", None, "attention", "feed-forward", "patterns", "all", "patterns"]
    )
    logits = run(model, plans, pool)
    for index, plan in enumerate(plans):
        expected = run(merged[plan.sequence.request.adapter], [plan])
        torch.testing.assert_close(logits[index : index + 1], expected, rtol=1e-4, atol=1e-4)
    assert (run(merged[None], plans) - logits).abs().amax(dim=1).gt(1e-2).tolist() == [
        plan.sequence.request.adapter is not None for plan in plans
    ]
    pool.close()


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_adapters_of_models_with_experts_and_latent_attention_equal_merged_weights(tmp_path, shape):
    """Attention, dense layers and shared experts have adapters."""
    make_folder(tmp_path, vary=0.1, **shape)
    kinds = KINDS if load_config(tmp_path).latent is None else LATENT_KINDS
    updates = write_adapter(tmp_path / "all", tmp_path, kinds=kinds)
    merged = merged_model(tmp_path, updates)
    model = pack(load_model(tmp_path))
    pool = pool_of(model, tmp_path, ("all",))
    plans = entries([5, 1, LARGEST_BATCHED + 9], ["all", None, "all"])
    logits = run(model, plans, pool)
    assert (logits[[0, 2]] - run(merged, plans)[[0, 2]]).abs().max() < 1e-4
    assert (logits[1] - run(load_model(tmp_path), plans)[1]).abs().max() < 1e-4
    assert (logits[2] - run(load_model(tmp_path), plans)[2]).abs().max() > 1e-2
    pool.close()


def test_the_bits_of_a_row_do_not_depend_on_other_rows(folders):
    folder, _ = folders
    model = pack(load_model(folder))
    alone = run(model, entries([1, 1], [None, None]))
    pool = pool_of(model, folder)
    names = ["all", None, "attention", "attention", "all"]
    plans = entries([1, 1, 1, LARGEST_BATCHED, 6], names)
    together = run(model, plans, pool)
    for index in range(3):
        assert torch.equal(run(model, [plans[index]], pool)[0], together[index])
    assert torch.equal(alone[1], together[1])
    pool.close()


@pytest.mark.parametrize("form", ["int8, channels", "fp8, blocks"])
def test_adapters_change_a_model_with_quantized_weights(tmp_path, form):
    folder, whole = tmp_path / "quantized", tmp_path / "whole"
    for made in (folder, whole):
        made.mkdir()
        make_folder(made, vary=0.1)
    save_file(quantize_folder(folder, FORMATS[form]), whole / "model.safetensors")
    updates = write_adapter(folder / "all", folder, rank=4)
    model = pack(load_model(folder))
    pool = pool_of(model, folder, ["all"])
    plans = entries([5, 1, 3], ["all", None, "all"])
    logits = run(model, plans, pool)
    for index, merged in enumerate((merged_model(whole, updates), load_model(whole))):
        torch.testing.assert_close(logits[index : index + 1], run(merged, [plans[index]]), rtol=1e-4, atol=1e-4)
    pool.close()
