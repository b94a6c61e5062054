"""The model that ships with the project."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.commands.prompts import read_texts
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
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
