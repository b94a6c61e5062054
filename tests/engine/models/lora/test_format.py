"""Adapters that cannot be used are refused with one line, from their configuration and headers."""

import pytest
import torch

from engine.models.checkpoint import Checkpoint
from engine.models.loader import load_config
from engine.models.lora.format import MAX_RANK, check_adapters
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json, removed, tensor, written
from tests.engine.lora_folders import write_adapter

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
    (config(init_lora_weights="loftq"), "'loftq' changes the base model"),
    (config(lora_alpha=float("inf")), "has an invalid lora_alpha, inf"),
    (config(lora_alpha=10**400), "has an invalid lora_alpha"),
    (config(rank_pattern=[1]), "has an invalid rank_pattern"),
    (config(rank_pattern={"(": 4}), "has an invalid rank_pattern"),
    (config(alpha_pattern="x"), "has an invalid alpha_pattern"),
    (config(r=5), "has shape.*but adapter_config.json describes"),
    (config(r=MAX_RANK + 1), f"is {MAX_RANK + 1}; adapters of rank 1 to {MAX_RANK}"),
    (config(r=0), "adapters of rank 1 to"),
    (config(r="4"), "the rank of .* is '4'"),
    (config(r=None), "the rank of .* is None"),
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
    write_adapter(tmp_path / "a", model_folder)
    tensor(Q + ".lora_A.weight", torch.full((4, 64), torch.nan))(tmp_path / "a")
    adapter = check_adapters({"mine": tmp_path / "a"}, load_config(model_folder))["mine"]
    with pytest.raises(UserError, match="not finite"):
        adapter.read()


def test_updates_are_those_of_the_written_matrices(model_folder, tmp_path):
    updates = write_adapter(
        tmp_path / "a", model_folder, kinds=("q_proj", "v_proj"), rank=3, rank_pattern={"v_proj": 5}, use_rslora=True
    )
    adapter = check_adapters({"mine": tmp_path / "a"}, load_config(model_folder))["mine"]
    read = adapter.read()
    assert read.keys() == {name.removesuffix(".weight") for name in updates}
    for name, (down, up) in read.items():
        assert down.shape == (64, 5 if "v_proj" in name else 3)
        torch.testing.assert_close((down @ up).t(), updates[f"{name}.weight"])
