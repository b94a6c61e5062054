"""DeepSeek-V3 as published: an MTP layer with latent attention and experts, also in fp8."""

import shutil
from contextlib import closing

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine.config import EngineConfig
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.sources import DraftSource
from engine.engine import build_engine
from engine.models.heads.formats import load_head
from engine.models.loader import load_config, load_model
from ssd.baselines.none import NoDrafter
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.forward import attend_densely
from tests.engine.models.quantized_formats import FORMATS, quantize_folder
from tests.engine.models.test_families import DEEPSEEK, TOKENS
from tests.engine.test_core import outputs, requests

LAYERS = 2
PREFIX = f"model.layers.{LAYERS}."


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
        _, states = target.hidden_states(tokens, positions, attend_densely, layers=head.hidden_layers)
        output = head(tokens[1:], head.target_states(states)[:-1], positions[1:], attend_densely)
        assert (head.logits(output.hidden) - expected).abs().max() < 1e-4


def test_drafts_of_the_mtp_layer_do_not_change_greedy_outputs(published):
    folder, submitted = published[0], requests(4, max_tokens=20)
    target = load_model(folder)
    config = EngineConfig(max_sequences=3, max_step_tokens=64, max_draft=4, in_flight=1)
    expected = outputs(build_engine(target, config, NoDrafter()), submitted)
    head = load_head("mtp", folder, target.config, target_folder=folder)
    head.attach(target)
    drafter = AutoregressiveDrafter(head, depth=3, has_trees=False, source=DraftSource.MTP)
    with closing(build_engine(target, config, drafter, has_budget=False)) as engine:
        assert outputs(engine, submitted) == expected


def test_fp8_weights_of_the_mtp_layer_are_dequantized(published, tmp_path):
    for name in ("fp8", "whole"):
        shutil.copytree(published[0], tmp_path / name)
    described = quantize_folder(
        tmp_path / "fp8", FORMATS["DeepSeek's fp8"], skip=("norm", "gate.weight", "embed", "head")
    )
    save_file(described, tmp_path / "whole" / "model.safetensors")
    config = load_config(published[0])
    heads = [load_head("mtp", tmp_path / name, config, target_folder=tmp_path / name) for name in ("fp8", "whole")]
    for left, right in zip(*(head.parameters() for head in heads), strict=True):
        torch.testing.assert_close(left, right)
