"""Names and fields of the published formats of heads, and folders in which they are found."""

import shutil
from dataclasses import replace
from functools import partial

import pytest
import torch

from engine.models.heads.eagle3 import LAYER_IDS, Eagle3Style
from engine.models.heads.formats import load_head, save_head
from engine.models.loader import load_model
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.models.heads import samples

LAYER = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    "post_attention_layernorm.weight",
)
"""Tensors of a decoder layer without its first norm."""
BIASES = tuple(f"self_attn.{name}_proj.bias" for name in "qkv")
MTP_NORMS = ("input_layernorm.weight", "token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight")


def layer_names(prefix, *more):
    return {prefix + name for name in (*LAYER, *more)}


WRITTEN = {
    # vLLM demands biases of Qwen2 and copies of the target's embedding and output projection.
    "mtp": (
        samples.mtp,
        layer_names(samples.MIMO, *BIASES, *MTP_NORMS, "input_proj.weight")
        | {"model.embed_tokens.weight", "lm_head.weight"},
        {
            "architectures": ["MiMoForCausalLM"], "model_type": "qwen2", "num_nextn_predict_layers": 1,
            "num_hidden_layers": 2, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
        },
    ),
    # SGLang leaves the bias of `fc` uninitialized if the file has none. To vLLM and SGLang, `bias` is of attention.
    "eagle": (
        partial(samples.eagle, has_bias=False, qkv_bias=True),
        layer_names("layers.0.", *BIASES) | {"fc.weight", "fc.bias"},
        {
            "architectures": ["LlamaForCausalLMEagle", "EagleLlamaForCausalLM"], "model_type": "llama",
            "num_hidden_layers": 1, "qkv_bias": True, "bias": None,
        },
    ),
    # vLLM numbers layers by the one that a state enters, SGLang by the one that it leaves.
    "eagle3": (
        partial(samples.eagle3, style=Eagle3Style(norm_before_fc=True, norm_output=True)),
        layer_names("midlayer.", "input_layernorm.weight", "hidden_norm.weight")
        | {"fc.weight", "input_norm.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"},
        {
            "architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 200, "vocab_size": 300,
            "target_hidden_size": 64, "num_hidden_layers": 1, "norm_before_residual": False, "norm_before_fc": True,
            "norm_output": True, LAYER_IDS: [0, 1, 2],
            "eagle_config": {LAYER_IDS: [-1, 0, 1], "use_aux_hidden_state": True, "norm_before_fc": True},
        },
    ),
    "medusa": (
        partial(samples.medusa, count=2, blocks=2),
        {f"{head}.{block}.linear.{kind}" for head in "01" for block in "01" for kind in ("weight", "bias")}
        | {"0.2.weight", "1.2.weight"},
        {"model_type": "medusa", "medusa_num_heads": 2, "medusa_num_layers": 2, "medusa_fc_bias": True},
    ),
}  # fmt: skip
"""What makes a head of each kind, the tensors in its file, and fields of its configuration."""


def written(folder, model, kind):
    """Write a head of a kind; return it, the tensors in its file, and the fields of its configuration."""
    head = WRITTEN[kind][0](model)
    save_head(head, folder, base_model="org/model")
    return head, *samples.read(folder, samples.FILES[kind])


@pytest.mark.parametrize("kind", WRITTEN)
def test_heads_are_written_in_their_authors_formats(tmp_path, model, kind):
    _, names, expected = WRITTEN[kind]
    _, tensors, fields = written(tmp_path, model, kind)
    assert tensors.keys() == names
    assert {name: fields.get(name) for name in expected} == expected
    assert fields["base_model_name_or_path"] == "org/model"


@pytest.mark.parametrize(("kind", "name"), [("mtp", samples.MIMO + BIASES[0]), ("eagle", "fc.bias")])
def test_biases_that_a_head_lacks_are_written_as_zeros(tmp_path, model, kind, name):
    _, tensors, _ = written(tmp_path, model, kind)
    assert not tensors[name].any()


def test_an_mtp_layer_is_written_with_the_output_projection_of_the_target(tmp_path, model):
    _, tensors, _ = written(tmp_path, model, "mtp")
    assert torch.equal(tensors["lm_head.weight"], model.lm_head.weight.bfloat16())


def test_the_vocabulary_of_eagle3_is_written_as_offsets_and_as_a_mask(tmp_path, model):
    head, tensors, _ = written(tmp_path, model, "eagle3")
    assert tensors["d2t"].dtype == torch.int64
    assert torch.equal(torch.arange(200) + tensors["d2t"], head.draft_vocabulary)
    assert torch.equal(tensors["t2d"].nonzero().flatten(), head.draft_vocabulary)


def is_equal(left, right):
    """Whether two heads have the same weights; MiMo's format adds biases of zero."""
    others = dict(right.state_dict())
    is_same = all(torch.equal(others.pop(name), weight) for name, weight in left.state_dict().items())
    return is_same and not any(each.any() for each in others.values())


@pytest.mark.parametrize(
    ("publish", "max_shard_size"), [(shutil.copytree, "50KB"), (samples.as_deepseek, "5GB")], ids=["mimo", "deepseek"]
)
def test_mtp_layers_load_from_the_folder_of_the_target(tmp_path, model, model_folder, publish, max_shard_size):
    """The target itself loads from the same folder."""
    head = samples.mtp(model)
    save_head(head, tmp_path / "head", dtype=torch.float32)
    publish(tmp_path / "head", tmp_path / "published")
    samples.into_target(tmp_path / "published", model_folder, both := tmp_path / "both", max_shard_size)
    target = load_model(both)
    assert target.config == model.config
    assert torch.equal(target.embedding.weight, model.embedding.weight)
    assert is_equal(head, load_head("mtp", both, model.config, target_folder=both))


def test_the_index_of_an_earlier_head_is_ignored(tmp_path, model):
    head = samples.eagle(model)
    save_head(head, tmp_path, dtype=torch.float32)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "gone.safetensors"}}')
    assert is_equal(head, load_head("eagle", tmp_path, model.config))


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
    head = getattr(samples, kind)(model)
    save_head(head, tmp_path, dtype=torch.float32)
    file = {"eagle": "pytorch_model.bin", "medusa": "medusa_lm_head.pt"}[kind]
    samples.as_pickle(tmp_path, file, samples.FILES[kind], _use_new_zipfile_serialization=is_archive)
    assert is_equal(head, load_head(kind, tmp_path, model.config))


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({LAYER_IDS: [1, 4, 8]}, (1, 4, 8)),
        ({LAYER_IDS: [8, 1, 4]}, (1, 4, 8)),
        ({"eagle_config": {LAYER_IDS: [1, 4, 8]}}, (2, 5, 9)),
        ({}, (2, 5, 7)),
    ],
    ids=["speculators", "not ascending", "ModelOpt", "none"],
)
def test_layers_of_eagle3_are_numbered_by_the_layer_that_a_state_enters(tmp_path, model, given, expected):
    save_head(samples.eagle3(model), tmp_path)
    tensors, fields = samples.read(tmp_path)
    for name in (LAYER_IDS, "eagle_config"):
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
    tokens = torch.arange(model.config.vocab_size)
    assert torch.equal(again.embed(tokens), head.embed(tokens))
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
