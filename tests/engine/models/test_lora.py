"""LoRA adapters: products equal those of merged weights; bad folders are refused."""

import numpy as np
import pytest
import torch

from engine.attention.plain import PlainAttention
from engine.executor.runner import Runner
from engine.models.checkpoint import Checkpoint
from engine.models.loader import load_config, load_model
from engine.models.lora.format import MAX_RANK, check_adapters
from engine.models.lora.pool import LARGEST_BATCHED, AdapterPool
from engine.models.packed import pack
from engine.scheduling.request import Request
from engine.scheduling.sequence import Sequence
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.damage import edit_json, removed, tensor, written
from tests.engine.lora_folders import KINDS, LATENT_KINDS, merged_model, write_adapter
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
    return AdapterPool(model, check_adapters({name: folder / name for name in names}, load_config(folder)))


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


Q = "base_model.model.model.layers.1.self_attn.q_proj"


def config(**changes):
    return lambda folder: edit_json(folder / "adapter_config.json", **changes)


BAD = [
    (removed("adapter_config.json"), "adapter_config.json"),
    (removed("adapter_model.safetensors"), "has no adapter_model.safetensors"),
    (written("adapter_model.safetensors", "{}"), "damaged"),
    (config(peft_type="IA3"), "peft_type 'IA3'; only LORA"),
    (config(use_dora=True), "DoRA is not supported"),
    (config(modules_to_save=["lm_head"]), "modules_to_save is not supported"),
    (config(bias="lora_only"), "biases are not supported"),
    (config(lora_bias=True), "lora_bias is not supported"),
    (config(init_lora_weights="pissa_niter_4"), "'pissa_niter_4' changes the base model"),
    (config(lora_alpha=10**400), "has an invalid lora_alpha"),
    (config(rank_pattern=[1]), "has an invalid rank_pattern"),
    (config(rank_pattern={"(": 4}), "has an invalid rank_pattern"),
    (config(alpha_pattern="x"), "has an invalid alpha_pattern"),
    (config(r=MAX_RANK + 1), f"is {MAX_RANK + 1}; adapters of rank 1 to {MAX_RANK}"),
    (config(r=0), "adapters of rank 1 to"),
    (config(r="4"), "the rank of .* is '4'"),
    (config(lora_alpha=None), "invalid lora_alpha"),
    (config(rank_pattern={"q_proj": 3}), "has shape"),
    (tensor("base_model.model.lm_head.lora_A.weight", torch.zeros(4, 64)), "it has .*lm_head.* only q_proj, k_proj"),
    (tensor("base_model.model.model.embed_tokens.lora_embedding_A", torch.zeros(4, 300)), "embed_tokens"),
    (tensor(Q + ".lora_magnitude_vector", torch.zeros(64)), "lora_magnitude_vector"),
    (tensor(Q.replace("layers.1", "layers.7") + ".lora_A.weight", torch.zeros(4, 64)), "it has .*layers.7"),
    (tensor(Q.replace("q_proj", "rotary") + ".lora_A.weight", torch.zeros(4, 64)), "rotary"),
    (tensor(Q + ".lora_B.weight", None), "lacks .*layers.1.self_attn.q_proj.lora_B"),
    (tensor(Q + ".lora_A.weight", torch.zeros(4, 63)), "has shape"),
    (tensor(Q + ".lora_A.weight", torch.zeros(4, 64, dtype=torch.int8)), "stored as I8"),
]


@pytest.mark.parametrize(("harm", "message"), BAD)
def test_bad_adapters_are_refused_by_name(model_folder, tmp_path, monkeypatch, harm, message):
    monkeypatch.setattr(Checkpoint, "copy_into", None)  # no weights may be read
    write_adapter(tmp_path / "a", model_folder)
    check_adapters({"mine": tmp_path / "a"}, load_config(model_folder))
    harm(tmp_path / "a")
    with pytest.raises(UserError, match=rf"^--lora mine: .*{message}") as caught:
        check_adapters({"mine": tmp_path / "a"}, load_config(model_folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("module", ["gate", "experts.0.w1"])
def test_experts_and_routers_take_no_adapter(tmp_path, module):
    make_folder(tmp_path, family="mixtral", num_local_experts=4)
    write_adapter(tmp_path / "a", tmp_path, kinds=("q_proj", "o_proj"))
    check_adapters({"mine": tmp_path / "a"}, load_config(tmp_path))
    name = f"base_model.model.model.layers.0.block_sparse_moe.{module}.lora_A.weight"
    tensor(name, torch.zeros(4, 64))(tmp_path / "a")
    with pytest.raises(
        UserError, match=f"it has .*{module}.*; adapters may change only q_proj, k_proj, v_proj, o_proj"
    ):
        check_adapters({"mine": tmp_path / "a"}, load_config(tmp_path))


def test_weights_that_are_not_finite_are_refused(model_folder, tmp_path):
    write_adapter(tmp_path / "mine", model_folder)
    tensor(Q + ".lora_A.weight", torch.full((4, 64), torch.nan))(tmp_path / "mine")
    adapters = check_adapters({"mine": tmp_path / "mine"}, load_config(model_folder))
    with pytest.raises(UserError, match=r"^--lora mine: .*not finite"):
        AdapterPool(load_model(model_folder), adapters)
