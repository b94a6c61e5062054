"""Quantized checkpoints give the weights that they describe; those that cannot be read are refused in one line."""

import json
import shutil
from itertools import product

import pytest
import torch

from engine.attention.plain import PlainAttention
from engine.models.checkpoint import Checkpoint
from engine.models.loader import checkpoint_views, load_config, load_model
from engine.models.quantization import read_quantization
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.damage import edit_json, tensor
from tests.engine.forward import prompt_logits
from tests.engine.models.quantized_formats import FORMATS, compressed, quantize_folder
from tests.engine.models.test_families import DEEPSEEK
from tests.engine.models.test_sharding import divided_logits

TOKENS = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
    "deepseek 3": {"family": "deepseek_v3", **DEEPSEEK},
}


OF_EXPERTS = ("int8, not symmetric", "packed, 4 bits, groups, not symmetric", "DeepSeek's fp8")
CASES = [*((form, "llama with biases") for form in FORMATS), *product(OF_EXPERTS, ("mixtral", "deepseek 3"))]
"""Every format, and one of each kind of values for models with experts and latent attention."""


@pytest.fixture(scope="module", params=CASES, ids=" ".join)
def quantized(request, tmp_path_factory):
    """A folder in each format, and the weights that it describes."""
    form, shape = request.param
    folder = tmp_path_factory.mktemp("quantized")
    make_folder(folder, vary=0.3, **{"initializer_range": 0.1, **MODELS[shape]})
    return folder, quantize_folder(folder, FORMATS[form])


def test_weights_are_exactly_those_of_the_checkpoint(quantized):
    """Also those of two ranks, whose logits are those of the whole model."""
    folder, described = quantized
    model = load_model(folder)
    for name, weight in checkpoint_views(model).items():
        assert torch.equal(weight, described[name].to(weight.dtype)), name
    expected = prompt_logits(model, TOKENS.numpy())
    assert (divided_logits(folder, 2, PlainAttention, TOKENS.numpy()) - expected).abs().max() < 1e-5


INT8, PACKED, FP8 = FORMATS["int8, channels"], FORMATS["packed, 4 bits, groups"], FORMATS["vLLM's fp8"]
LAYER = "model.layers.0.self_attn.o_proj."


@pytest.fixture(scope="module")
def made(tmp_path_factory, model_folder):
    """Quantized folders by their format."""
    root = tmp_path_factory.mktemp("quantized")
    for form in (INT8, PACKED, FP8):
        quantize_folder(shutil.copytree(model_folder, root / str(id(form))), form)
    return root


def changed(made, form, to, changes):
    """Copy a folder with tensors of a layer changed; None removes one."""
    shutil.copytree(made / str(id(form)), to, dirs_exist_ok=True)
    for name, value in changes.items():
        tensor(LAYER + name, value)(to)
    return to


@pytest.mark.parametrize(
    ("form", "changes", "message"),
    [
        (INT8, {"weight_scale": None}, "lacks .*o_proj.weight_scale; download"),
        (INT8, {"weight": None}, "lacks .*o_proj.weight; download"),
        (INT8, {"weight_scale": torch.ones(64)}, r"weight_scale in .* has shape \(64,\), but .* describes \(64, 1\)"),
        (INT8, {"weight": torch.ones(64, 32, dtype=torch.int8)}, r"o_proj.weight in .* has shape \(64, 32\)"),
        (INT8, {"weight_scale": torch.full((64, 1), torch.nan)}, "o_proj.weight_scale in .* not finite"),
        (INT8, {"weight_scale": torch.ones(64, 1, dtype=torch.int8)}, "weight_scale in .* is stored as I8"),
        (INT8, {"weight": torch.ones(64, 64, dtype=torch.int16)}, "is stored as I16; this engine reads I8 here"),
        (INT8, {"weight_g_idx": torch.ones(64)}, "has the tensor .*weight_g_idx, which config.json does not"),
        (INT8, {"weight_zero_point": torch.ones(64)}, "has the tensor .*weight_zero_point, which config.json does not"),
        (PACKED, {"weight_packed": torch.ones(64, 9, dtype=torch.int32)}, r"weight_packed in .* has shape \(64, 9\)"),
        (PACKED, {"weight_scale": torch.ones(64, 1)}, r"weight_scale in .* has shape \(64, 1\)"),
        (PACKED, {"weight_shape": torch.tensor([64, 32])}, r"weight_shape in .* is \(64, 32\)"),
        (PACKED, {"weight_shape": None}, "lacks .*o_proj.weight_shape; download"),
        (FP8, {"weight_scale": torch.tensor(torch.inf)}, "o_proj.weight_scale in .* not finite"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(made, tmp_path, monkeypatch, form, changes, message):
    folder = changed(made, form, tmp_path, changes)
    monkeypatch.setattr(Checkpoint, "copy_into", None)  # no weights may be read
    with pytest.raises(UserError, match=message) as refusal:
        load_model(folder)
    assert "\n" not in str(refusal.value)


def test_values_that_are_not_numbers_are_refused_and_scales_of_activations_are_not_read(made, tmp_path):
    unread = {"input_scale": torch.full((1,), torch.nan), "k_scale": torch.ones(1)}
    load_model(changed(made, FP8, tmp_path, unread))
    weight = torch.full((64, 64), torch.nan).to(torch.float8_e4m3fn)
    with pytest.raises(UserError, match=r"o_proj.weight in .* not finite"):
        load_model(changed(made, FP8, tmp_path, {"weight": weight}))


METHODS = {
    **{name: {"quant_method": name} for name in ("gptq", "awq", "bitsandbytes", "torchao", "quark", "modelopt")},
    "mxfp4": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
    "None": {"bits": 8},
    "e5m2": {"quant_method": "fp8", "fmt": "e5m2"},
    "nvfp4-pack-quantized": compressed("nvfp4-pack-quantized", "tensor_group", kind="float", bits=4, group_size=16),
    "marlin-24": compressed("marlin-24", "channel", bits=4),
    "int-quantized': int of 4 bits": compressed("int-quantized", "channel", bits=4),
    "actorder 'group'": compressed("pack-quantized", "group", bits=4, group_size=32, actorder="group"),
    "strategy 'tensor_group'": compressed("int-quantized", "tensor_group", group_size=16),
    "not symmetric": compressed("float-quantized", "channel", kind="float", symmetric=False),
    "sparse-24-bitmask": {**INT8.fields, "sparsity_config": {"format": "sparse-24-bitmask"}},
    "transforms": {**INT8.fields, "transform_config": {"config_groups": {"u": {"type": "hadamard"}}}},
    "removed experts": {**INT8.fields, "moe_sparsity_config": {"method": "prune"}},
}


@pytest.mark.parametrize("name", METHODS)
def test_other_quantization_is_refused_by_name(model_folder, tmp_path, name):
    (tmp_path / "config.json").write_text((model_folder / "config.json").read_text())
    edit_json(tmp_path / "config.json", quantization_config=METHODS[name])
    with pytest.raises(UserError, match=r"describes quantized weights \(.*; it reads compressed-tensors") as refusal:
        load_config(tmp_path)
    assert name.replace("':", "',") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def with_group(**changes):
    group = {**INT8.fields["config_groups"]["group_0"], **changes}
    return {**INT8.fields, "config_groups": {"group_0": group}}


@pytest.mark.parametrize(
    "fields",
    [
        ["int8"],
        {"quant_method": ["fp8"]},
        {"quant_method": "fp8", "weight_block_size": [0, 1]},
        {"quant_method": "compressed-tensors"},
        {**INT8.fields, "config_groups": {"W8A16": ["Linear"]}},
        {**INT8.fields, "ignore": "lm_head"},
        {**INT8.fields, "sparsity_config": [1]},
        with_group(targets=["re:("]),
        with_group(weights={"num_bits": "eight"}),
        with_group(weights={"strategy": "group", "group_size": 0}),
        with_group(weights={"strategy": "block", "block_structure": "16x16"}),
        with_group(weights=[8]),
    ],
    ids=json.dumps,
)
def test_invalid_fields_are_refused(fields):
    with pytest.raises(UserError, match="quantiz") as refusal:
        read_quantization({"quantization_config": fields})
    assert "\n" not in str(refusal.value)


def test_rounded_activations_and_caches_are_noticed():
    activations = {"num_bits": 8, "type": "int", "strategy": "token", "dynamic": True}
    fields = with_group(input_activations=activations) | {"kv_cache_scheme": {"num_bits": 8, "type": "float"}}
    first, second = read_quantization({"quantization_config": fields}).notices
    assert "activations in 8-bit int, which this engine does not round" in first
    assert "KV cache" in second
    assert read_quantization({"quantization_config": INT8.fields}).notices == ()


@pytest.mark.parametrize("is_reversed", [False, True])
def test_the_most_precise_target_applies_in_any_order(is_reversed):
    """Targets and layers to ignore are classes, expressions and names."""
    targets = {1: ["Linear"], 2: ["re:.*down_proj", "re:.*mlp.gate.*"], 4: ["model.layers.1.mlp.down_proj"]}
    groups = {
        f"group_{size}": {"targets": names, "weights": {"strategy": "group", "group_size": size}}
        for size, names in sorted(targets.items(), reverse=is_reversed)
    }
    ignored = ["lm_head", "re:.*v_proj"]
    fields = {**INT8.fields, "format": "pack-quantized", "config_groups": groups, "ignore": ignored}
    quantization = read_quantization({"quantization_config": fields})
    sizes = {"layers.0.mlp.up_proj": 1, "layers.0.mlp.gate_proj": 2, "layers.0.mlp.down_proj": 2}
    sizes |= {"layers.1.mlp.down_proj": 4, "layers.0.self_attn.v_proj": None, "embed_tokens": None}
    for name, size in sizes.items():
        scheme = quantization.scheme(f"model.{name}.weight")
        assert (None if scheme is None else scheme.block) == (None if size is None else (1, size))
    assert quantization.scheme("lm_head.weight") is None
    assert quantization.scheme("model.layers.0.mlp.up_proj.bias") is None
