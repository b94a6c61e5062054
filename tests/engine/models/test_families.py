"""Logits of every family equal those of transformers, which also loads saved models."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM

from engine.attention.plain import PlainAttention
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.executor.runner import Runner
from engine.models import packed
from engine.models.families import FAMILIES as SUPPORTED
from engine.models.folders import read_json
from engine.models.hf_config import config_from_hf, config_to_hf
from engine.models.layers import PLAIN, Ops
from engine.models.loader import load_config, load_model, save_model
from engine.models.packed import pack, quantize_int8
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.damage import edit_json
from tests.engine.forward import PAGE_SIZE, attend_densely, prompt_logits, sequence_of
from tests.engine.models.test_rope import rope
from tests.engine.steps import batch_of

LLAMA3 = rope("llama3", 500.0, 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)
YARN = rope("yarn", 500.0, 4.0, 128)
QWEN3_EXPERTS = {"head_dim": 32, "num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 40, "n_group": 4, "topk_group": 2}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 8, "v_head_dim": 12}
DEEPSEEK = {**ROUTED, **LATENT, "num_key_value_heads": 4, "tie_word_embeddings": False}

# Shapes of every entry of `engine.models.families.FAMILIES`.
FAMILIES = {
    "llama 2": {"num_key_value_heads": 4, "tie_word_embeddings": False},
    "llama 3": {"rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0}},
    "llama 3.1": {"rope_parameters": LLAMA3},
    "llama with biases": {"attention_bias": True, "mlp_bias": True},
    "llama, linear rope": {"rope_parameters": rope("linear", 500.0, 4.0)},
    "llama, dynamic rope": {"rope_parameters": rope("dynamic", 500.0, 4.0)},
    "mistral": {"family": "mistral", "sliding_window": None, "tie_word_embeddings": False},
    "mistral with a wide window": {"family": "mistral", "sliding_window": 512},
    "mistral with wide heads": {"family": "mistral", "sliding_window": None, "head_dim": 32},
    "qwen 2.5": {"family": "qwen2"},
    "qwen 2.5, untied, yarn": {"family": "qwen2", "tie_word_embeddings": False, "rope_parameters": YARN},
    "qwen 3": {"family": "qwen3", "head_dim": 32},
    "qwen 3 with biases": {"family": "qwen3", "head_dim": 16, "attention_bias": True, "tie_word_embeddings": False},
    "qwen 3, yarn": {"family": "qwen3", "head_dim": 32, "rope_parameters": YARN},
    "mixtral": {"family": "mixtral", "num_local_experts": 8},
    "qwen 3, experts": {"family": "qwen3_moe", **QWEN3_EXPERTS, "norm_topk_prob": True},
    "deepseek 2": {"family": "deepseek_v2", **DEEPSEEK, "topk_method": "group_limited_greedy"},
    "deepseek 2 lite": {"family": "deepseek_v2", **DEEPSEEK, "q_lora_rank": None, "first_k_dense_replace": 1},
    "deepseek 3": {"family": "deepseek_v3", **DEEPSEEK, "first_k_dense_replace": 1},
    "deepseek 3, another order of rope": {"family": "deepseek_v3", **DEEPSEEK, "rope_interleave": False},
    "qwen 3, some layers with experts": {"family": "qwen3_moe", **QWEN3_EXPERTS, "mlp_only_layers": [0]},
}
TOKENS = torch.randint(0, VOCAB, (400,), generator=torch.Generator().manual_seed(1))


def test_every_family_has_a_shape():
    """MiMo, which transformers lacks, is tested with its MTP layers."""
    tested = {shape.get("family", "llama") for shape in FAMILIES.values()} | {"mimo"}
    assert tested == {family.model_type for family in SUPPORTED.values()}


@pytest.fixture
def threads(request):
    """Set PyTorch's number of threads; other tests use one."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


def transformers_logits(model, tokens=TOKENS):
    with torch.inference_mode():
        return model(tokens[None]).logits[0].float()


@pytest.fixture(scope="module", params=FAMILIES.values(), ids=FAMILIES.keys())
def case(request, tmp_path_factory):
    """A folder of each shape, and transformers' logits."""
    folder = tmp_path_factory.mktemp("model")
    return folder, transformers_logits(make_folder(folder, vary=0.3, **request.param))


def test_logits_equal_those_of_transformers(case):
    folder, expected = case
    for model in (load_model(folder), pack(load_model(folder))):
        assert (prompt_logits(model, TOKENS.numpy()) - expected).abs().max() < 1e-4


def test_transformers_loads_a_saved_model(case, tmp_path):
    folder, expected = case
    model = load_model(folder)
    save_model(model, tmp_path, read_json(folder / "config.json"), dtype=torch.float32)
    assert load_config(tmp_path) == model.config
    assert len({file.stat().st_mode for file in tmp_path.iterdir()}) == 1
    if model.config.experts is None and model.config.latent is None:
        assert config_from_hf(config_to_hf(model.config, "float32")) == model.config
    found = transformers_logits(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert (found - expected).abs().max() < 1e-4


@pytest.mark.parametrize(
    "name",
    [
        *("llama 3.1", "llama with biases", "mistral with wide heads", "qwen 2.5, untied, yarn", "qwen 3"),
        *("mixtral", "qwen 3, experts", "deepseek 2", "deepseek 3"),
    ],
)
def test_bfloat16_logits_have_the_same_direction(tmp_path, name):
    make_folder(tmp_path, vary=0.3, **{**FAMILIES[name], "initializer_range": 0.1})
    expected = transformers_logits(AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16))
    model = pack(load_model(tmp_path, dtype=torch.bfloat16))
    similarity = torch.cosine_similarity(prompt_logits(model, TOKENS), expected, dim=-1)
    # Where two experts have nearly equal scores, rounding decides which one runs.
    assert similarity.quantile(0.0 if model.config.experts is None else 0.05) > 0.99


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="this build of PyTorch has no oneDNN")
@pytest.mark.parametrize(
    ("family", "form", "dtype", "threads"),
    [
        *(("llama with biases", *how) for how in ((pack, torch.float32, 1), (pack, torch.float32, 2))),
        *((family, pack, torch.bfloat16, 1) for family in ("llama with biases", "qwen 3, experts")),
        *((family, pack, torch.float32, 1) for family in ("qwen 3, yarn", "mixtral", "qwen 3, experts")),
        *((family, quantize_int8, torch.float32, 1) for family in ("llama 3", "mixtral")),
        *((family, quantize_int8, torch.bfloat16, 1) for family in ("llama 3", "mixtral")),
    ],
    indirect=["threads"],
)
@pytest.mark.usefixtures("threads")
def test_rounding_does_not_depend_on_the_step(tmp_path, monkeypatch, family, form, dtype):
    """With packed and with int8 weights, a token's logits are bitwise equal alone and within a draft of any length."""
    monkeypatch.setattr(packed, "TILE", 40 * 64)  # products of several tiles
    make_folder(tmp_path, vary=0.3, **FAMILIES[family])
    model = form(load_model(tmp_path, dtype=dtype))
    runner = Runner(model, PlainAttention(model.config, 32, PAGE_SIZE, dtype, "cpu"))
    tokens = TOKENS.numpy()

    def forward(start, count):
        entry = sequence_of(tokens[: start + 1], range(32), computed=start, draft=tokens[start + 1 : start + count])
        return runner.forward(batch_of([entry], PAGE_SIZE))

    together = torch.cat((forward(0, 250), forward(250, 11)))
    for start, count in ((249, 1), (250, 1), (251, 2), (253, 3), (40, 9), (252, 9)):
        assert torch.equal(forward(start, count), together[start : start + count])


@pytest.mark.parametrize(
    ("shape", "context"),
    [
        ({"family": "mistral", "sliding_window": 100}, 100),
        ({"family": "mistral", "sliding_window": 1000}, 512),
        ({"family": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 1}, 100),
        ({"family": "qwen2", "use_sliding_window": True, "sliding_window": 100, "max_window_layers": 2}, 512),
        ({"family": "qwen3", "use_sliding_window": False, "sliding_window": 100, "max_window_layers": 0}, 512),
        ({"rope_parameters": {**YARN, "factor": 8.0}}, 1024),
        ({"rope_parameters": {**YARN, "factor": 2.0}}, 512),
    ],
)
def test_the_context_ends_at_the_sliding_window(tmp_path, shape, context):
    make_folder(tmp_path, **shape)
    assert load_config(tmp_path).max_positions == context


def test_within_a_sliding_window_attention_is_full(tmp_path):
    """The context is the longest one at which both agree; with one more token, transformers drops the first."""
    reference = make_folder(tmp_path, family="mistral", sliding_window=100)
    model = load_model(tmp_path)
    tokens = TOKENS[: model.config.max_positions]
    assert (prompt_logits(model, tokens.numpy()) - transformers_logits(reference, tokens)).abs().max() < 1e-4
    full = make_folder(tmp_path, family="mistral", sliding_window=None)
    longer = TOKENS[: model.config.max_positions + 1]
    difference = (transformers_logits(full, longer) - transformers_logits(reference, longer)).abs()
    assert difference[:-1].max() < 1e-4 < difference[-1].max()


@pytest.mark.parametrize("fields", [LLAMA3, YARN, rope("linear", 500.0, 4.0)])
def test_both_rope_formats_give_the_same_config(tmp_path, fields):
    make_folder(tmp_path, rope_parameters=fields)
    expected = load_config(tmp_path)
    older = {("type" if name == "rope_type" else name): value for name, value in fields.items() if name != "rope_theta"}
    edit_json(tmp_path / "config.json", rope_parameters=None, rope_theta=fields["rope_theta"], rope_scaling=older)
    assert load_config(tmp_path) == expected


@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="weights are packed by oneDNN")
@pytest.mark.parametrize(("name", "tolerance"), [("llama 3", 0), ("qwen 3, experts", 0), ("deepseek 3", 1e-4)])
def test_drafts_that_are_paths_leave_log_probabilities_unchanged(tmp_path, name, tolerance):
    """They are equal to the last bit, except with latent attention."""
    make_folder(tmp_path, **FAMILIES[name])
    model = pack(load_model(tmp_path))
    output = np.tile(np.arange(5, 12, dtype=np.uint32), 12)
    request = Request(TOKENS[:40].numpy().astype(np.uint32), SamplingParams(max_tokens=84, logprobs=0), recorded=output)
    config = EngineConfig(max_sequences=1, max_draft=8)
    engines = [build_engine(model, config, drafter) for drafter in (NoDrafter(), NgramDrafter())]
    [plain], [drafted] = (engine.generate([request]) for engine in engines)
    assert drafted.accepted > 40
    np.testing.assert_allclose(drafted.logprobs.tokens, plain.logprobs.tokens, rtol=0, atol=tolerance)


class OverwritingOps(Ops):
    """Plain operations that reuse their inputs' memory, as the fused kernels do."""

    def add_norm(self, residual, change, weight, eps):
        if change is None:
            return residual, F.rms_norm(residual, weight.shape, weight, eps)
        residual += change
        change.copy_(F.rms_norm(residual, weight.shape, weight, eps))
        return residual, change


@pytest.mark.parametrize("ops", [PLAIN, OverwritingOps()], ids=["plain", "overwriting"])
@torch.inference_mode()
def test_hidden_states_are_those_of_transformers(model, model_folder, ops):
    tokens, positions = torch.arange(1, 30) * 7 % VOCAB, torch.arange(29)
    reference = AutoModelForCausalLM.from_pretrained(model_folder).eval()
    expected = reference(tokens[None], output_hidden_states=True).hidden_states
    outputs = []
    reference.model.layers[-1].register_forward_hook(lambda _, __, output: outputs.append(output))
    reference(tokens[None])
    before_norm = outputs[0][0] if isinstance(outputs[0], tuple) else outputs[0]
    normed, states = model.hidden_states(tokens, positions, attend_densely, ops, layers=(2, 0, 1))
    for index, state in enumerate((before_norm, expected[0], expected[1])):
        torch.testing.assert_close(states[:, index], state[0] if state.ndim == 3 else state, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(normed, expected[-1][0], rtol=1e-4, atol=1e-4)
    assert torch.equal(normed, model(tokens, positions, attend_densely, ops))
    for layer in (-1, 3):
        with pytest.raises(ValueError, match="after layers 0 to 2"):
            model.hidden_states(tokens, positions, attend_densely, layers=(1, layer))
