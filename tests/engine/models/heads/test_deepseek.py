"""DeepSeek-V3 as published: fp8 weights with scales of blocks, and an MTP layer with latent attention and experts."""

from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.heads.formats import check_head, load_head
from engine.models.loader import load_config, load_model, model_checkpoint
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.forward import prompt_logits
from tests.engine.models.heads.test_twins import DenseAttention
from tests.engine.models.test_families import DEEPSEEK, TOKENS
from tests.engine.test_core import outputs, requests

LAYERS = 2
BLOCK = 16
PREFIX = f"model.layers.{LAYERS}."


def quantize(weight):
    """Return a weight as fp8, and its scales, block by block."""
    stored = torch.empty_like(weight, dtype=torch.float8_e4m3fn)
    scales = torch.empty(-(-weight.shape[0] // BLOCK), -(-weight.shape[1] // BLOCK))
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[block].abs().max() / 448
            stored[block] = (weight[block] / scales[row, column]).to(torch.float8_e4m3fn)
    return stored, scales


def naive_dequantize(weight, scales):
    result = torch.empty(weight.shape)
    for row in range(weight.shape[0]):
        for column in range(weight.shape[1]):
            result[row, column] = float(weight[row, column]) * float(scales[row // BLOCK, column // BLOCK])
    return result


def make_published(folder):
    """Write a folder whose last layer is an MTP layer; return transformers' model of all layers and further tensors."""
    shape = {**DEEPSEEK, "first_k_dense_replace": 1, "num_hidden_layers": LAYERS + 1}
    reference = make_folder(folder, family="deepseek_v3", vary=0.3, **shape)
    tensors = load_file(folder / "model.safetensors")
    torch.manual_seed(7)
    extra = {name: 1 + 0.3 * torch.randn(64) for name in ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")}
    extra["eh_proj.weight"] = 0.3 * torch.randn(64, 128)
    extra["embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    extra["shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    tensors |= {PREFIX + name: tensor for name, tensor in extra.items()}
    save_file(tensors, folder / "model.safetensors")
    edit_json(folder / "config.json", num_hidden_layers=LAYERS, num_nextn_predict_layers=1)
    return reference, extra


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder and the result of `make_published`."""
    folder = tmp_path_factory.mktemp("deepseek")
    return folder, *make_published(folder)


def twin_logits(reference, extra, tokens):
    """Logits of the MTP layer after tokens 1 to the last: DeepSeek-V3, section 2.2, with transformers' layers."""
    model = reference.model
    length = len(tokens)
    positions = torch.arange(length)[None]
    hidden = model.embed_tokens(tokens)[None]
    for layer in model.layers[:LAYERS]:
        hidden = layer(hidden, position_embeddings=model.rotary_emb(hidden, positions), attention_mask=None)
    states = model.norm(hidden)[:, :-1]
    embeddings = model.embed_tokens(tokens[1:])[None].clone()
    embeddings[:, 0] = 0

    def norm(states, weight):
        return torch.nn.functional.rms_norm(states, (64,), extra[weight], 1e-6)

    pairs = torch.cat((norm(embeddings, "enorm.weight"), norm(states, "hnorm.weight")), -1) @ extra["eh_proj.weight"].T
    rotary = model.rotary_emb(pairs, positions[:, 1:])
    hidden = model.layers[LAYERS](pairs, position_embeddings=rotary, attention_mask=None)
    return reference.lm_head(norm(hidden, "shared_head.norm.weight"))[0]


def test_the_mtp_layer_equals_a_twin(published):
    folder, reference, extra = published
    target, tokens = load_model(folder), TOKENS[:60]
    head = load_head("mtp", folder, target.config, target_folder=folder)
    head.attach(target)
    with torch.inference_mode():
        expected = twin_logits(reference, extra, tokens)
        positions = torch.arange(60)
        _, states = target.hidden_states(tokens, positions, DenseAttention(), layers=head.hidden_layers)
        output = head(tokens[1:], head.target_states(states)[:-1], positions[1:], DenseAttention())
        assert (head.logits(output.hidden) - expected).abs().max() < 1e-4


@pytest.mark.parametrize(("depth", "shape"), [(1, "path"), (3, "path"), (3, "tree")])
def test_drafts_of_the_mtp_layer_do_not_change_greedy_outputs(published, depth, shape):
    folder, submitted = published[0], requests(4, max_tokens=20)
    target = load_model(folder)
    config = EngineConfig(
        max_sequences=3, max_step_tokens=64, max_draft=4, draft_shape=shape, in_flight=int(shape == "path")
    )
    expected = outputs(build_engine(target, config, NoDrafter()), submitted)
    head = load_head("mtp", folder, target.config, target_folder=folder)
    head.attach(target)
    drafter = AutoregressiveDrafter(head, depth=depth, has_trees=shape == "tree", source=DraftSource.MTP)
    with closing(build_engine(target, config, drafter, has_budget=False)) as engine:
        assert outputs(engine, submitted) == expected


@pytest.fixture(scope="module")
def quantized(published, tmp_path_factory):
    """The same folder with weights of layers in fp8, and one in which they are dequantized one by one."""
    made = []
    tensors = load_file(published[0] / "model.safetensors")
    stored, plain = {}, {}
    for name, tensor in tensors.items():
        stored[name] = plain[name] = tensor
        if (name.endswith("_proj.weight") and "mlp" in name) or "self_attn.o_proj" in name:
            stored[name], stored[f"{name}_scale_inv"] = quantize(tensor)
            plain[name] = naive_dequantize(stored[name], stored[f"{name}_scale_inv"])
    for each in (stored, plain):
        folder = tmp_path_factory.mktemp("fp8")
        save_file(each, folder / "model.safetensors")
        (folder / "config.json").write_text((published[0] / "config.json").read_text())
        made.append(folder)
    method = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}
    edit_json(made[0] / "config.json", quantization_config=method)
    return made


def test_fp8_weights_are_dequantized(quantized):
    loaded, expected = (load_model(folder) for folder in quantized)
    logits = [prompt_logits(model, TOKENS[:20].numpy()) for model in (loaded, expected)]
    assert (logits[0] - logits[1]).abs().max() < 1e-4
    heads = [load_head("mtp", folder, loaded.config, target_folder=folder) for folder in quantized]
    for left, right in zip(*(head.parameters() for head in heads), strict=True):
        torch.testing.assert_close(left, right)


def test_a_part_of_an_fp8_weight_is_that_of_the_whole(quantized):
    name = "model.layers.0.self_attn.o_proj.weight"
    whole, part = {name: torch.empty(64, 48)}, {name: torch.empty(20, 26)}
    checkpoint = model_checkpoint(quantized[0])
    checkpoint.copy_into(whole)
    checkpoint.copy_into(part, lambda _: (slice(5, 25), slice(14, 40)))
    assert torch.equal(part[name], whole[name][5:25, 14:40])


def copy(folder, to, *, drop=(), change=None):
    tensors = load_file(folder / "model.safetensors")
    save_file(
        {name: tensor for name, tensor in (tensors | (change or {})).items() if name not in drop},
        to / "model.safetensors",
    )
    (to / "config.json").write_text((folder / "config.json").read_text())
    return to


SCALES = "model.layers.0.self_attn.o_proj.weight_scale_inv"


def test_fp8_weights_without_scales_are_refused(quantized, tmp_path):
    with pytest.raises(UserError, match=r"lacks .*o_proj.weight_scale_inv"):
        load_model(copy(quantized[0], tmp_path, drop=[SCALES]))


def test_scales_of_another_shape_are_refused(quantized, tmp_path):
    with pytest.raises(UserError, match=r"weight_scale_inv in .* has shape"):
        load_model(copy(quantized[0], tmp_path, change={SCALES: torch.ones(1, 1)}))


def test_experts_that_the_configuration_does_not_describe_are_refused(published, tmp_path):
    folder = copy(published[0], tmp_path)
    target = load_config(folder)
    edit_json(folder / "config.json", architectures=["Qwen3ForCausalLM"], model_type="qwen3", head_dim=16)
    with pytest.raises(UserError, match="has multi-head latent attention"):
        check_head("mtp", folder, target, target_folder=folder)
