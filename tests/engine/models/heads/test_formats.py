"""Names and fields of the published formats of heads, and folders in which they are found."""

import shutil
from dataclasses import replace

import pytest
import torch

from engine.models.heads.eagle3 import Eagle3Style
from engine.models.heads.formats import load_head, save_head
from engine.models.loader import load_model
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.models.heads import samples


def outputs(head, target, kind):
    """Outputs of a head for 7 random pairs without attention, and its logits."""
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(7, len(head.hidden_layers), target.config.hidden_size, generator=generator)
    states = head.target_states(hidden)
    if kind == "medusa":
        return [head(states)]
    tokens = torch.randint(0, target.config.vocab_size, (7,), generator=generator)
    ratio = head.config.num_heads // head.config.num_kv_heads
    output = head(tokens, states, torch.arange(1, 8), lambda *given: given[3].repeat_interleave(ratio, dim=1))
    return [output.hidden, output.state, head.logits(output.hidden)]


LAYER = {
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
    "post_attention_layernorm.weight",
}
"""Tensors of a decoder layer without its first norm."""


def layer_names(prefix, *more):
    return {prefix + name for name in (*LAYER, *more)}


def test_mtp_layers_are_written_as_mimo_publishes_them(tmp_path, model):
    """vLLM demands biases of Qwen2 and copies of the target's embedding and output projection."""
    save_head(samples.mtp(model), tmp_path)
    tensors, fields = samples.read(tmp_path)
    biases = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
    norms = ("input_layernorm.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")
    own = layer_names("model.mtp_layers.0.", *biases, *norms, "input_proj.weight")
    assert set(tensors) == own | {"model.embed_tokens.weight", "lm_head.weight"}
    assert not tensors["model.mtp_layers.0.self_attn.q_proj.bias"].any()
    assert torch.equal(tensors["lm_head.weight"].float(), model.lm_head.weight.bfloat16().float())
    assert fields["architectures"] == ["MiMoForCausalLM"]
    assert fields["model_type"] == "qwen2"
    assert fields["num_nextn_predict_layers"] == 1
    assert fields["num_hidden_layers"] == 2
    assert fields["tie_word_embeddings"] is False
    assert fields["torch_dtype"] == "bfloat16"


def test_eagle_heads_are_written_in_their_authors_format(tmp_path, model):
    """SGLang leaves the bias of `fc` uninitialized if the file has none."""
    save_head(samples.eagle(model, has_bias=False, qkv_bias=True), tmp_path)
    tensors, fields = samples.read(tmp_path)
    biases = ("self_attn.q_proj.bias", "self_attn.k_proj.bias", "self_attn.v_proj.bias")
    assert set(tensors) == layer_names("layers.0.", *biases) | {"fc.weight", "fc.bias"}
    assert not tensors["fc.bias"].any()
    assert fields["architectures"] == ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"]
    assert fields["model_type"] == "llama"
    assert fields["num_hidden_layers"] == 1
    assert fields["qkv_bias"] is True
    assert "bias" not in fields  # of attention, to vLLM and SGLang


def test_eagle3_heads_are_written_in_their_authors_format(tmp_path, model):
    """vLLM numbers layers by the one that a state enters, SGLang by the one that it leaves."""
    head = samples.eagle3(model, style=Eagle3Style(norm_before_fc=True, norm_output=True), kept=200)
    save_head(head, tmp_path)
    tensors, fields = samples.read(tmp_path)
    layer = layer_names("midlayer.", "input_layernorm.weight", "hidden_norm.weight")
    assert set(tensors) == layer | {"fc.weight", "input_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(torch.arange(200) + tensors["d2t"], head.draft_vocabulary)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), head.draft_vocabulary)
    assert fields["architectures"] == ["LlamaForCausalLMEagle3"]
    assert fields["draft_vocab_size"] == 200
    assert fields["vocab_size"] == model.config.vocab_size
    assert fields["target_hidden_size"] == model.config.hidden_size
    assert fields["num_hidden_layers"] == 1
    assert fields["eagle_aux_hidden_state_layer_ids"] == [0, 1, 2]
    assert fields["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [-1, 0, 1]
    assert (fields["norm_before_residual"], fields["norm_before_fc"], fields["norm_output"]) == (False, True, True)


def test_medusa_heads_are_written_in_their_authors_format(tmp_path, model):
    save_head(samples.medusa(model, count=2, blocks=2), tmp_path, base_model="org/model")
    tensors, fields = samples.read(tmp_path, "medusa_lm_head.safetensors")
    blocks = {f"{head}.{block}.linear.{kind}" for head in "01" for block in "01" for kind in ("weight", "bias")}
    assert set(tensors) == blocks | {"0.2.weight", "1.2.weight"}
    assert (fields["medusa_num_heads"], fields["medusa_num_layers"], fields["medusa_fc_bias"]) == (2, 2, True)
    assert (fields["model_type"], fields["base_model_name_or_path"]) == ("medusa", "org/model")


@pytest.mark.parametrize("max_shard_size", ["5GB", "50KB"])
@pytest.mark.parametrize("publish", [shutil.copytree, samples.as_deepseek], ids=["mimo", "deepseek"])
def test_mtp_layers_load_from_the_folder_of_the_target(tmp_path, model, model_folder, publish, max_shard_size):
    """The target itself loads from the same folder."""
    head = samples.mtp(model)
    save_head(head, tmp_path / "head", dtype=torch.float32)
    publish(tmp_path / "head", tmp_path / "published")
    samples.into_target(tmp_path / "published", model_folder, both := tmp_path / "both", max_shard_size)
    target = load_model(both)
    assert target.config == model.config
    assert torch.equal(target.embedding.weight, model.embedding.weight)
    again = load_head("mtp", both, model.config, target_folder=both)
    again.attach(model)
    for left, right in zip(outputs(head, model, "mtp"), outputs(again, model, "mtp"), strict=True):
        assert torch.equal(left, right)


def test_further_mtp_layers_are_ignored(tmp_path, model):
    head = samples.mtp(model)
    save_head(head, tmp_path, dtype=torch.float32)
    tensors, fields = samples.read(tmp_path)
    more = {name.replace("layers.0", "layers.1"): 2 * tensor for name, tensor in tensors.items()}
    samples.write(tmp_path, {**more, **tensors}, {**fields, "num_nextn_predict_layers": 2})
    again = load_head("mtp", tmp_path, model.config)
    assert torch.equal(again.fc.weight, head.fc.weight)


@pytest.mark.parametrize("is_archive", [True, False], ids=["archive", "before PyTorch 1.6"])
@pytest.mark.parametrize("kind", ["eagle", "medusa"])
def test_pickled_weights_load(tmp_path, model, kind, is_archive):
    head = samples.eagle(model) if kind == "eagle" else samples.medusa(model)
    save_head(head, tmp_path, dtype=torch.float32)
    files = {"eagle": ("model.safetensors", "pytorch_model.bin")}
    old, new = files.get(kind, ("medusa_lm_head.safetensors", "medusa_lm_head.pt"))
    samples.as_pickle(tmp_path, new, old, _use_new_zipfile_serialization=is_archive)
    again = load_head(kind, tmp_path, model.config)
    again.attach(model)
    assert torch.equal(outputs(head, model, kind)[0], outputs(again, model, kind)[0])


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}, (1, 4, 8)),
        ({"eagle_aux_hidden_state_layer_ids": [8, 1, 4]}, (1, 4, 8)),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 8]}}, (2, 5, 9)),
        ({}, (2, 5, 7)),
    ],
    ids=["speculators", "not ascending", "ModelOpt", "none"],
)
def test_layers_of_eagle3_are_numbered_by_the_layer_that_a_state_enters(tmp_path, model, given, expected):
    save_head(samples.eagle3(model), tmp_path)
    tensors, fields = samples.read(tmp_path)
    for name in ("eagle_aux_hidden_state_layer_ids", "eagle_config"):
        del fields[name]
    samples.write(tmp_path, tensors, {**fields, **given})
    assert load_head("eagle3", tmp_path, replace(model.config, num_layers=10)).hidden_layers == expected


def test_a_copy_of_the_target_embedding_is_dropped(tmp_path, model):
    """A copy that is being trained stays."""
    head = samples.eagle(model, has_embedding=True)
    head.attach(model)
    assert head.embedding is not None
    head.embedding.load_state_dict(model.embedding.state_dict())
    save_head(head, tmp_path, dtype=torch.float32)
    again = load_head("eagle", tmp_path, model.config)
    assert again.embedding is not None
    again.attach(model)
    assert again.embedding is None
    for left, right in zip(outputs(head, model, "eagle"), outputs(again, model, "eagle"), strict=True):
        assert torch.equal(left, right)
    head.embedding.requires_grad_(True)
    head.attach(model)
    assert head.embedding is not None


def test_a_head_loads_in_the_dtype_and_with_the_positions_of_the_target(tmp_path, model):
    save_head(samples.eagle3(model), tmp_path)
    tensors, fields = samples.read(tmp_path)
    samples.write(tmp_path, tensors, {**fields, "max_position_embeddings": 100})
    head = load_head("eagle3", tmp_path, model.config, dtype=torch.bfloat16)
    assert {parameter.dtype for parameter in head.parameters()} == {torch.bfloat16}
    assert head.frequencies.dtype == torch.float32
    assert head.config.max_positions == model.config.max_positions
    assert not any(parameter.requires_grad for parameter in head.parameters())


def test_optional_tensors_are_recognized_by_their_names(tmp_path, model):
    """Heads for Qwen3 are published with its `model_type` and without its norms of queries and keys."""
    save_head(samples.eagle3(model, qkv_bias=True), tmp_path)
    tensors, fields = samples.read(tmp_path)
    samples.write(tmp_path, tensors, {**fields, "model_type": "qwen3", "attention_bias": False})
    config = load_head("eagle3", tmp_path, model.config).config
    assert (config.qk_norm, config.qkv_bias, config.output_bias, config.mlp_bias) == (False, True, False, False)


def test_mimo_is_a_family(tmp_path):
    """MiMo is Qwen2 with MTP layers, which do not change its logits."""
    make_folder(tmp_path, family="qwen2", vary=0.3)
    plain = load_model(tmp_path)
    edit_json(
        tmp_path / "config.json", architectures=["MiMoForCausalLM"], model_type="mimo", num_nextn_predict_layers=1
    )
    mimo = load_model(tmp_path)
    assert replace(mimo.config, architecture="Qwen2ForCausalLM") == plain.config
    save_head(samples.mtp(mimo), tmp_path / "head", dtype=torch.float32)
    samples.into_target(tmp_path / "head", tmp_path, tmp_path / "both")
    assert load_head("mtp", tmp_path / "both", load_model(tmp_path / "both").config).config.qkv_bias
