"""Models load from folders, also as drafters of others; folders that cannot be used are refused with a reason."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from engine.models.loader import check_draft_model, load_draft_model, load_model
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.damage import config, cut, removed, set_to, tensor, written
from tests.engine.models.test_families import DEEPSEEK


def copy_head(folder, change=lambda embedding: embedding):
    """Store the embedding as the output projection, too."""
    tensor("lm_head.weight", change(load_file(folder / "model.safetensors")["model.embed_tokens.weight"]))(folder)


def test_a_copy_of_the_tied_head_is_accepted_and_end_tokens_of_the_generation_config_are_added(tmp_path, model_folder):
    folder = shutil.copytree(model_folder, tmp_path / "model")
    copy_head(folder)
    written("generation_config.json", '{"eos_token_id": [7, 0]}')(folder)
    loaded = load_model(str(folder)).config
    assert (loaded.tie_embeddings, loaded.eos_token_ids) == (True, (0, 7))


DEEPSEEK_V3 = {**DEEPSEEK, "architectures": ["DeepseekV3ForCausalLM"], "routed_scaling_factor": 1.0}

V_PROJ, K_PROJ = "model.layers.0.self_attn.v_proj.bias", "model.layers.1.self_attn.k_proj.weight"
INDEX = "model.safetensors.index.json"
GENERATION = '{"eos_token_id": "</s>"}'
DAMAGES = [
    (shutil.rmtree, "no model folder"),
    (removed("config.json"), "has no config.json"),
    (written("config.json", "{"), "cannot be read"),
    (written("config.json", "[]"), "not a JSON object"),
    (config(architectures=["MambaForCausalLM"]), "'MambaForCausalLM', which .* one of LlamaForCausalLM, "),
    (config(architectures={}), "none"),
    (config(hidden_size=None), "hidden_size"),
    (config(num_hidden_layers="two"), "invalid field: .*two"),
    (config(num_attention_heads=0), "num_heads must be from 1 to"),
    (config(num_key_value_heads=3), "cannot share 3"),
    (config(hidden_size=10**30), "hidden_size must be from 1 to"),
    (config(eos_token_id=VOCAB), "end token 300"),
    (config(hidden_size=-1), "hidden_size must be from 1 to"),
    (config(eos_token_id=[1, -1]), "end token -1"),
    (config(eos_token_id="</s>"), "invalid field: .*</s>"),
    (written("generation_config.json", GENERATION), "generation_config.json .*</s>"),
    (lambda folder: (folder / "model.safetensors").rename(folder / INDEX).write_text("{}"), "no weight_map"),
    (config(rope_parameters=[1]), "rope_parameters"),
    (config(rope_parameters={"rope_type": "longrope"}), "'longrope', which this engine does not support"),
    (config(rope_parameters={"rope_type": "llama3"}), "lacks the field 'low_freq_factor'"),
    (config(rope_parameters={"rope_type": "linear", "factor": 0}), "factor of rope scaling must be a number above 0"),
    (config(rope_parameters={"rope_theta": float("nan")}), "rope_theta must be a number above 1, not nan"),
    (config(rope_parameters={"partial_rotary_factor": 0.5}), "part of a head"),
    (config(rope_parameters={"full_attention": {"rope_theta": 1e4}}), "per layer or for part"),
    (config(layer_types=["full_attention", "chunked_attention"]), "chunked_attention"),
    (config(layer_types=5), "has an invalid field"),
    (config(hidden_act="gelu"), "gelu"),
    (config(attention_bias=True), "lacks model.layers.0.self_attn.k_proj.bias and 7 more"),
    (config(architectures=["Qwen3MoeForCausalLM"]), "lacks the field 'num_local_experts'"),
    (config(architectures=["MixtralForCausalLM"], num_experts_per_tok=9), "cannot use 9 experts of 1 groups of 8"),
    (config(architectures=["MixtralForCausalLM"]), "has the tensor model.layers.0.mlp"),
    (config(**DEEPSEEK_V3, topk_method="greedy"), "routing of experts that .* does not have .*topk_method 'greedy'"),
    (config(**DEEPSEEK_V3, attention_bias=True), "requires biases in latent attention"),
    (config(**DEEPSEEK_V3), "has the tensor model.layers.0.self_attn.k_proj"),
    (
        config(architectures=["Qwen3ForCausalLM"], head_dim=16),
        "lacks model.layers.0.self_attn.k_norm.weight and 3 more",
    ),
    (config(quantization_config={"quant_method": "awq"}), "quantized weights"),
    (config(intermediate_size=128), "shape"),
    (config(num_hidden_layers=1), "has the tensor model.layers.1"),
    (config(num_hidden_layers=3), "lacks model.layers.2.input_layernorm.weight and 8 more"),
    (tensor(V_PROJ, torch.zeros(64)), f"has the tensor {V_PROJ}"),
    (lambda folder: copy_head(folder, set_to(5, 1.0)), "lm_head.weight differs from .* set it to false there"),
    (lambda folder: copy_head(folder, lambda embedding: embedding[1:]), r"lm_head.weight in .* has shape \(299, 64\)"),
    (tensor("lm_head.bias", torch.zeros(VOCAB)), "has the tensor lm_head.bias"),
    (tensor(K_PROJ, set_to(5, float("nan"))), "k_proj.weight in .* not finite as float32"),
    (tensor(K_PROJ, set_to(5, float("-inf"))), "k_proj.weight in .* not finite as float32"),
    (
        tensor("model.norm.weight", torch.full((64,), 1e300, dtype=torch.float64)),
        "norm.weight .* not finite as float32",
    ),
    (tensor("model.norm.weight", torch.ones(64, dtype=torch.int8)), "stored as I8"),
    (removed("model.safetensors"), "has no model.safetensors"),
    (cut("model.safetensors", 0.5), "cut short"),
    (cut("model.safetensors", 0.0001), "cut short"),
]


@pytest.mark.parametrize(("harm", "message"), DAMAGES)
def test_an_invalid_folder_is_refused_with_a_reason(tmp_path, model_folder, harm, message):
    folder = shutil.copytree(model_folder, tmp_path / "model")
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


def test_a_single_file_takes_precedence_over_shards(tmp_path, model_folder, model):
    """As in transformers; the index of an earlier model may be left."""
    make_folder(tmp_path, seed=1, max_shard_size="50KB")
    assert (tmp_path / INDEX).exists()
    shutil.copy(model_folder / "model.safetensors", tmp_path)
    assert torch.equal(load_model(tmp_path).embedding.weight, model.embedding.weight)


def test_a_missing_shard_is_named(tmp_path):
    make_folder(tmp_path, max_shard_size="50KB")
    shard = sorted(tmp_path.glob("model-*.safetensors"))[0]
    shard.unlink()
    with pytest.raises(UserError, match=shard.name):
        load_model(tmp_path)


MEASURE = """
import sys
from pathlib import Path
from engine.models.loader import load_model
from engine.models.sharding import Shard, load_shard

def kib(field):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(field))

small, whole = map(Path, sys.argv[1:])
load_model(small)  # one-time allocations of PyTorch are not counted
for name, load in {"whole": lambda: load_model(whole), "rank": lambda: load_shard(whole, Shard(1, 2))}.items():
    before = kib("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    model = load()
    print(name, kib("VmHWM") - before, sum(parameter.nbytes for parameter in model.parameters()) // 1024)
    del model
"""


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux")
def test_loading_makes_no_second_copy_of_the_weights(tmp_path, model_folder):
    """The same holds for one of two ranks, which reads only its part."""
    make_folder(tmp_path, hidden_size=512, intermediate_size=1536, num_hidden_layers=4, head_dim=128)
    command = [sys.executable, "-c", MEASURE, str(model_folder), str(tmp_path)]
    # Memory that is freed is returned at once, so that the next case does not use it again.
    printed = subprocess.check_output(command, text=True, env=os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"})
    found = {name: (int(peak), int(weights)) for name, peak, weights in map(str.split, printed.splitlines())}
    assert list(found) == ["whole", "rank"]
    for name, (peak, weights) in found.items():
        assert 45_000 < weights * (2 if name == "rank" else 1) < 60_000
        assert peak < 1.25 * weights


def copy(folder, to, **shape):
    """Write a model of another size with the tokenizer of `folder`."""
    make_folder(to, num_hidden_layers=1, **shape)
    shutil.copy(folder / "tokenizer.json", to / "tokenizer.json")
    return to


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("size", [VOCAB, VOCAB + 10, VOCAB + 20])
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


def swap_tokens(folder, left, right):
    fields = json.loads((folder / "tokenizer.json").read_text())
    vocab = fields["model"]["vocab"]
    vocab[left], vocab[right] = vocab[right], vocab[left]
    (folder / "tokenizer.json").write_text(json.dumps(fields))


def without_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


UNSUITABLE = [
    (VOCAB - 50, None, "give --draft-model a model with the target's tokenizer"),
    (VOCAB + 8, without_tokenizer, "vocabulary of 308, but the target has one of 300"),
    (VOCAB, lambda folder: swap_tokens(folder, "!", '"'), r"token 1 is '\"' there and '!' in .*tiny; give"),
    (VOCAB, shutil.rmtree, "no model folder"),
]


@pytest.mark.parametrize(("size", "harm", "message"), UNSUITABLE)
def test_models_that_cannot_draft_are_refused(tmp_path, model_folder, size, harm, message):
    """Without a tokenizer, sizes of vocabularies are compared."""
    without_tokenizer(suitable := copy(model_folder, tmp_path / "suitable", vocab_size=VOCAB))
    assert check_draft_model(suitable, model_folder).num_layers == 1
    draft = copy(model_folder, tmp_path / "draft", vocab_size=size)
    if harm is not None:
        harm(draft)
    with pytest.raises(UserError, match=message) as refusal:
        check_draft_model(draft, model_folder)
    assert "\n" not in str(refusal.value)


def test_the_target_itself_is_refused(tmp_path, model_folder):
    (tmp_path / "link").symlink_to(model_folder)
    for folder in (model_folder, tmp_path / "link"):
        with pytest.raises(UserError, match="is the target itself"):
            check_draft_model(folder, model_folder)
