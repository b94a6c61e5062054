"""Checkpoints with quantized weights compute what their dequantized weights compute."""

import pytest
import torch
from safetensors.torch import save_file

from engine.attention.plain import PlainAttention
from engine.executor.runner import Runner
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.quantized.linear import QuantizedGroupedLinear, QuantizedLinear, multiply
from engine.models.quantized.storage import QuantizedWeight
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.forward import PAGE_SIZE, prompt_logits, sequence_of
from tests.engine.models.quantized.formats import FORMATS, quantize_folder
from tests.engine.models.test_families import DEEPSEEK, transformers_logits
from tests.engine.models.test_sharding import divided_logits
from tests.engine.steps import batch_of

TOKENS = torch.randint(0, VOCAB, (100,), generator=torch.Generator().manual_seed(1))
MODELS = {
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "mixtral": {"family": "mixtral", "num_local_experts": 4},
}
formats = pytest.mark.parametrize("form", FORMATS.values(), ids=FORMATS.keys())


@pytest.mark.parametrize("shape", MODELS.values(), ids=MODELS.keys())
@formats
def test_logits_equal_those_of_dequantized_weights(tmp_path, form, shape):
    reference = make_folder(tmp_path, vary=0.3, **{"initializer_range": 0.1, **shape})
    described = quantize_folder(tmp_path, form)
    whole = tmp_path / "whole"
    whole.mkdir()
    save_file(described, whole / "model.safetensors", metadata={"format": "pt"})
    (whole / "config.json").write_text(reference.config.to_json_string())
    expected = transformers_logits(type(reference).from_pretrained(whole), TOKENS)
    model = pack(load_model(tmp_path))
    kept = [each for each in model.modules() if isinstance(each, QuantizedLinear | QuantizedGroupedLinear)]
    assert len(kept) == 8
    assert (prompt_logits(model, TOKENS.numpy()) - expected).abs().max() < 1e-4


@formats
def test_weights_are_exactly_those_of_the_checkpoint(tmp_path, form, monkeypatch):
    make_folder(tmp_path)
    described = quantize_folder(tmp_path, form)
    layer = load_model(tmp_path).layers[1]
    down = layer.feed_forward.down_proj
    weight = QuantizedWeight(down.values, down.scales, down.zeros, down.columns)
    assert torch.equal(weight.dequantize(), described["model.layers.1.mlp.down_proj.weight"])
    # Other devices than a CPU get the dequantized weights.
    monkeypatch.setattr("engine.models.loader.keep_quantized", lambda *_: None)
    layer = load_model(tmp_path).layers[1]
    assert torch.equal(layer.feed_forward.down_proj.weight, described["model.layers.1.mlp.down_proj.weight"])


@pytest.mark.parametrize(("count", "family"), [(2, "llama with biases"), (4, "llama with biases"), (2, "mixtral")])
@formats
def test_logits_of_a_divided_model_equal_those_of_the_whole(tmp_path, form, count, family):
    make_folder(tmp_path, vary=0.3, **{"initializer_range": 0.1, **MODELS[family]})
    quantize_folder(tmp_path, form)
    expected = prompt_logits(load_model(tmp_path), TOKENS.numpy())
    got = divided_logits(tmp_path, count, PlainAttention, TOKENS.numpy())
    assert (got - expected).abs().max() < 1e-5


@pytest.mark.parametrize("form", ["int8, channels", "fp8, blocks"])
def test_latent_attention_and_shared_experts_with_quantized_weights(tmp_path, monkeypatch, form):
    make_folder(tmp_path, vary=0.3, family="deepseek_v3", **{**DEEPSEEK, "initializer_range": 0.1})
    quantize_folder(tmp_path, FORMATS[form])
    logits = [prompt_logits(load_model(tmp_path), TOKENS.numpy()), divided_logits(tmp_path, 2, PlainAttention, TOKENS)]
    monkeypatch.setattr("engine.models.loader.keep_quantized", lambda *_: None)
    expected = prompt_logits(load_model(tmp_path), TOKENS.numpy())
    for each in logits:
        assert (each - expected).abs().max() < 1e-5


@pytest.mark.parametrize("family", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["int8, channels", "fp8, blocks"])
def test_rounding_does_not_depend_on_the_step(tmp_path, family, dtype, form):
    make_folder(tmp_path, vary=0.3, **MODELS[family])
    quantize_folder(tmp_path, FORMATS[form])
    model = pack(load_model(tmp_path, dtype=dtype))
    tokens = TOKENS.numpy()

    def forward(runner, *, start, count):
        entry = sequence_of(tokens[: start + 1], range(8), computed=start, draft=tokens[start + 1 : start + count])
        return runner.forward(batch_of([entry], PAGE_SIZE))

    runner = Runner(model, PlainAttention(model.config, 8, PAGE_SIZE, dtype, "cpu"))
    together = forward(runner, start=0, count=100)
    for count in (1, 2, 3, 9):
        assert torch.equal(forward(runner, start=40, count=count), together[40 : 40 + count])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_products_of_several_tiles_are_the_same_for_any_number_of_rows(monkeypatch, dtype):
    monkeypatch.setattr("engine.models.quantized.linear.TILE", 40 * 96)
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(-128, 128, (100, 96), generator=generator).to(torch.int8)
    weight = QuantizedWeight(values, torch.rand(100, 3, generator=generator), None, 32)
    hidden = torch.randn(70, 96, generator=generator).to(dtype)
    together = multiply(hidden, weight)
    expected = hidden.float() @ weight.dequantize().to(dtype).float().T
    torch.testing.assert_close(together.float(), expected, rtol=1e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    for count in (1, 2, 3, 5, 33, 64):
        assert torch.equal(multiply(hidden[:count], weight), together[:count])


def test_a_layer_with_weights_of_several_kinds_is_dequantized(tmp_path):
    make_folder(tmp_path)
    quantize_folder(tmp_path, FORMATS["int8, channels"], skip=("k_proj", "embed_tokens"))
    layer = load_model(tmp_path).layers[0]
    assert isinstance(layer.attention.qkv_proj, torch.nn.Linear)
    assert isinstance(layer.attention.o_proj, QuantizedLinear)


def test_quantized_weights_take_a_byte_each(tmp_path):
    make_folder(tmp_path)
    quantize_folder(tmp_path, FORMATS["int8, channels"])
    layers = load_model(tmp_path).layers
    linear = [module for module in layers.modules() if isinstance(module, QuantizedLinear)]
    for module in linear:
        rows, columns = module.values.shape
        assert sum(each.numel() * each.element_size() for each in module.parameters()) == rows * columns + 4 * rows
