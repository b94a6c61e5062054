"""Models load from folders, also as drafters of others; folders that cannot be used are refused with a reason."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from engine.models.folders import read_json
from engine.models.loader import (
    check_draft_model,
    fit_vocabulary,
    load_config,
    load_draft_model,
    load_model,
    save_model,
)
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.damage import config, cut, edit_json, removed, set_to, tensor, written
from tests.engine.models.test_families import DEEPSEEK


def test_the_older_rope_format_is_read(tmp_path):
    make_folder(tmp_path, rope_parameters={"rope_type": "default", "rope_theta": 500.0})
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=500.0)
    assert load_config(tmp_path).rope.theta == 500.0


def test_a_copy_of_the_tied_head_is_accepted(tmp_path, model_folder):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    tensor("lm_head.weight", torch.ones(VOCAB, 64))(folder)
    assert load_model(folder).config.tie_embeddings


def test_end_tokens_of_the_generation_config_are_added(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [7, 0]}')
    assert load_config(tmp_path).eos_token_ids == (0, 7)


def test_a_saved_model_loads_unchanged(tmp_path, model, model_folder):
    save_model(model, tmp_path, read_json(model_folder / "config.json"), dtype=torch.float32)
    again = load_model(tmp_path)
    assert again.config == model.config
    for (name, left), (_, right) in zip(model.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    weights, config = (tmp_path / name for name in ("model.safetensors", "config.json"))
    assert weights.stat().st_mode == config.stat().st_mode


DEEPSEEK_V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "routed_scaling_factor": 1.0}

DAMAGES = {
    "no folder": (shutil.rmtree, "no model folder"),
    "no config": (removed("config.json"), "has no config.json"),
    "config is not JSON": (written("config.json", "{"), "cannot be read"),
    "config is a list": (written("config.json", "[]"), "not a JSON object"),
    "another architecture": (config(architectures=["MambaForCausalLM"]), "MambaForCausalLM"),
    "no architecture": (config(architectures=None), "none"),
    "a field is missing": (config(hidden_size=None), "hidden_size"),
    "a field of another type": (config(num_hidden_layers="two"), "invalid field: .*two"),
    "no heads": (config(num_attention_heads=0), "num_heads must be at least 1"),
    "heads that cannot share": (config(num_key_value_heads=3), "cannot share 3"),
    "a negative size": (config(hidden_size=-1), "hidden_size must be at least 1"),
    "a size out of range": (config(hidden_size=10**30), "hidden_size must be less than"),
    "an end token out of the vocabulary": (config(eos_token_id=VOCAB), "end token 300"),
    "an end token below 0": (config(eos_token_id=[1, -1]), "end token -1"),
    "an end token that is not a number": (config(eos_token_id="</s>"), "invalid field: .*</s>"),
    "an end token of the generation config that is not a number": (
        written("generation_config.json", '{"eos_token_id": "</s>"}'),
        "generation_config.json .*</s>",
    ),
    "rope parameters that are not an object": (config(rope_parameters=[1]), "rope_parameters"),
    "an index without a map": (written("model.safetensors.index.json", '{"weight_map": null}'), "no weight_map"),
    "another rope scaling": (
        config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}),
        "'longrope', which this engine does not support",
    ),
    "a rope scaling without its parameters": (
        config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}),
        "lacks the field 'low_freq_factor'",
    ),
    "a rope scaling factor out of range": (
        config(rope_parameters={"rope_type": "linear", "factor": 0}),
        "factor of rope scaling must be a number above 0",
    ),
    "a rope base out of range": (
        config(rope_parameters={"rope_theta": float("nan")}),
        "rope_theta must be a number above 1, not nan",
    ),
    "rope on a part of a head": (
        config(rope_parameters={"rope_theta": 1e4, "partial_rotary_factor": 0.5}),
        "part of a head",
    ),
    "rope for each kind of layer": (
        config(rope_parameters={"full_attention": {"rope_theta": 1e4}}),
        "per layer or for part",
    ),
    "another kind of layer": (config(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
    "kinds of layers that are not a list": (config(layer_types=5), "has an invalid field"),
    "a family that is not supported": (
        config(architectures=["Qwen3NextForCausalLM"]),
        "'Qwen3NextForCausalLM', which this engine does not support; give a folder with one of LlamaForCausalLM, ",
    ),
    "architectures that are not a list": (config(architectures={}), "none"),
    "another activation": (config(hidden_act="gelu"), "gelu"),
    "missing biases": (config(attention_bias=True), "lacks model.layers.0.self_attn.k_proj.bias and 7 more"),
    "experts without their number": (
        config(architectures=["Qwen3MoeForCausalLM"]),
        "lacks the field 'num_local_experts'",
    ),
    "more experts for a token than there are": (
        config(architectures=["MixtralForCausalLM"], num_experts_per_tok=9),
        "a token cannot use 9 experts of 1 groups of 8 experts",
    ),
    "missing experts": (config(architectures=["MixtralForCausalLM"]), "has the tensor model.layers.0.mlp"),
    "another routing": (
        config(**DEEPSEEK_V3, topk_method="greedy"),
        "routing of experts that this engine does not have .*topk_method 'greedy'",
    ),
    "biases in latent attention": (config(**DEEPSEEK_V3, attention_bias=True), "requires biases in latent attention"),
    "missing latents": (config(**DEEPSEEK_V3), "has the tensor model.layers.0.self_attn.k_proj"),
    "missing norms": (
        config(architectures=["Qwen3ForCausalLM"], head_dim=16),
        "lacks model.layers.0.self_attn.k_norm.weight and 3 more",
    ),
    "a weight that is not a number": (
        tensor("model.layers.1.self_attn.k_proj.weight", set_to(5, float("nan"))),
        "not finite as float32",
    ),
    "an infinite weight": (
        tensor("model.layers.1.self_attn.k_proj.weight", set_to(5, float("-inf"))),
        "k_proj.weight in .* not finite",
    ),
    "no weights": (removed("model.safetensors"), "has no model.safetensors"),
    "weights cut short": (cut("model.safetensors", 0.5), "cut short"),
    "weights cut in their header": (cut("model.safetensors", 0.0001), "cut short"),
    "weights of another shape": (config(intermediate_size=128), "shape"),
    "weights of more layers": (config(num_hidden_layers=1), "has the tensor model.layers.1"),
    "a bias that the config does not name": (
        tensor("model.layers.0.self_attn.q_proj.bias", torch.zeros(64)),
        "has the tensor model.layers.0.self_attn.q_proj.bias",
    ),
    "quantized weights": (config(quantization_config={"quant_method": "awq"}), "quantized weights"),
    "weights that are not floats": (tensor("model.norm.weight", torch.ones(64, dtype=torch.int8)), "stored as I8"),
    "weights of fewer layers": (config(num_hidden_layers=3), "lacks model.layers.2.input_layernorm.weight and 8 more"),
}


@pytest.mark.parametrize(("harm", "message"), DAMAGES.values(), ids=DAMAGES.keys())
def test_an_invalid_folder_is_refused_with_a_reason(tmp_path, model_folder, harm, message):
    folder = tmp_path / "model"
    shutil.copytree(model_folder, folder)
    harm(folder)
    with pytest.raises(UserError, match=message) as refusal:
        load_model(folder)
    assert "\n" not in str(refusal.value)


def test_a_model_too_large_for_the_memory_is_refused(model_folder, monkeypatch):
    def refuse(*_, **__):
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 1 bytes")

    monkeypatch.setattr(torch.nn.Module, "load_state_dict", refuse)
    with pytest.raises(UserError, match="do not fit into the memory of 'cpu'; load the model as bfloat16"):
        load_model(model_folder)


def test_a_missing_shard_is_named(tmp_path):
    make_folder(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_model(tmp_path)


MEASURE = """
import sys
from pathlib import Path
from engine.models.sharding import Shard
from engine.models.folders import read_json
from engine.models.loader import load_model
from engine.models.sharding import load_shard

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

small, large, ranks = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
load = load_model if ranks == 1 else lambda folder: load_shard(folder, Shard(1, ranks))
load(small)  # one-time allocations of PyTorch are not counted
before = kib("VmRSS")
Path("/proc/self/clear_refs").write_text("5")  # resets the peak
model = load(large)
print(before, kib("VmHWM"), sum(parameter.nbytes for parameter in model.parameters()) // 1024)
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
@pytest.mark.parametrize(("files", "ranks"), [("whole", 1), ("sharded", 1), ("whole", 2)])
def test_loading_makes_no_second_copy_of_the_weights(tmp_path, model_folder, files, ranks):
    """The same holds for one of two ranks, which reads only its part."""
    shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 4, "head_dim": 128}
    make_folder(tmp_path, max_shard_size="20MB" if files == "sharded" else "5GB", **shape)
    assert (tmp_path / "model.safetensors").exists() == (files == "whole")
    command = [sys.executable, "-c", MEASURE, str(model_folder), str(tmp_path), str(ranks)]
    before, peak, weights = map(int, subprocess.check_output(command, text=True).split())
    assert 45_000 / ranks < weights < 60_000 / ranks
    assert peak - before < 1.25 * weights


def copy(folder, to, **shape):
    """Write a model of another size with the tokenizer of `folder`."""
    make_folder(to, num_hidden_layers=1, **shape)
    shutil.copy(folder / "tokenizer.json", to / "tokenizer.json")
    return to


def swap_tokens(folder, left, right):
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def test_a_model_with_the_same_tokens_is_accepted(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    assert check_draft_model(draft, model_folder).num_layers == 1
    assert load_draft_model(draft, model_folder).config.num_layers == 1


def test_without_tokenizers_sizes_are_compared(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    (draft / "tokenizer.json").unlink()
    check_draft_model(draft, model_folder)
    other = copy(model_folder, tmp_path / "other", vocab_size=VOCAB + 8)
    (other / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="vocabulary of 308, but the target has one of 300"):
        check_draft_model(other, model_folder)


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCAB, VOCAB + 20])
def test_padding_may_differ(tmp_path, model_folder, size, tied):
    """Logits of common tokens stay the same."""
    target = copy(model_folder, tmp_path / "target", vocab_size=VOCAB + 10)
    draft = copy(model_folder, tmp_path / "draft", vocab_size=size, tie_word_embeddings=tied)
    model, plain = load_draft_model(draft, target), load_model(draft)
    assert model.config.vocab_size == VOCAB + 10
    hidden = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    assert model.logits(hidden).shape == (3, VOCAB + 10)
    kept = min(size, VOCAB + 10)
    torch.testing.assert_close(model.logits(hidden)[:, :kept], plain.logits(hidden)[:, :kept])
    assert torch.equal(model.embedding(torch.arange(VOCAB)), plain.embedding(torch.arange(VOCAB)))
    assert not model.embedding(torch.arange(kept, VOCAB + 10)).any()
    assert (model.lm_head.weight is model.embedding.weight) == tied


def test_a_model_of_the_same_size_stays_as_it_is(model):
    assert fit_vocabulary(model, VOCAB) is model


def test_a_vocabulary_smaller_than_the_tokenizer_is_refused(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft", vocab_size=VOCAB - 50)
    with pytest.raises(UserError, match="give --draft-model a model with the target's tokenizer"):
        check_draft_model(draft, model_folder)


def test_other_tokens_are_refused_by_the_first_that_differs(tmp_path, model_folder):
    draft = copy(model_folder, tmp_path / "draft")
    swap_tokens(draft, "!", '"')
    with pytest.raises(UserError, match=r"token 1 is '\"' there and '!' in .*tiny; give") as refusal:
        check_draft_model(draft, model_folder)
    assert "\n" not in str(refusal.value)


def test_the_target_itself_is_refused(tmp_path, model_folder):
    (tmp_path / "link").symlink_to(model_folder)
    for folder in (model_folder, tmp_path / "link"):
        with pytest.raises(UserError, match="is the target itself"):
            check_draft_model(folder, model_folder)


def test_a_folder_without_a_model_is_refused(tmp_path, model_folder):
    with pytest.raises(UserError, match="no model folder"):
        check_draft_model(tmp_path / "missing", model_folder)
