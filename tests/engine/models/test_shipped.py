"""The model and the heads that ship with the project."""

import json
import re

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.commands.prompts import read_texts
from engine.config import EngineConfig
from engine.drafters import build
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter, configure
from engine.engine import build_engine
from engine.models.heads.formats import load_head
from engine.models.layers import PLAIN
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import PROMPTS_FILE, SHIPPED_HEADS, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from tests.engine.drafters.toy import attend_densely
from tests.engine.forward import prompt_logits
from tests.engine.models.heads import samples
from tests.engine.models.heads import test_twins as twins
from tests.engine.steps import each_of

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


def test_the_model_card_compares_the_model_with_the_ngram_model():
    card = (SHIPPED_MODEL / "README.md").read_text()
    own = float(re.search(r"\| this model \| ([\d.]+)", card)[1])
    ngram = float(re.search(r"\| interpolated Kneser-Ney .*? \| ([\d.]+)", card)[1])
    assert own < ngram


def test_prompts_come_only_from_held_out_files(tokenizer):
    files = json.loads((SHIPPED_MODEL / "files.json").read_text())
    assert not set(files["train"]) & set(files["held_out"])
    lines = (SHIPPED_MODEL / "prompts.jsonl").read_text().splitlines()
    assert {json.loads(line)["source"].split(":")[0] for line in lines} <= set(files["held_out"])
    assert len(set(PROMPTS)) == len(PROMPTS) >= 120
    assert all(len(tokenizer.encode(prompt)) <= 256 for prompt in PROMPTS)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("drafter", ["ngram", "ssd"])
def test_drafts_change_only_the_number_of_steps(shipped, tokenizer, drafter, temperature):
    sampling = SamplingParams(max_tokens=64, temperature=temperature)
    requests = [Request(tokenizer.encode(prompt), sampling) for prompt in PROMPTS[:6]]
    config = EngineConfig(max_sequences=4)
    plain = build_engine(shipped, config, NoDrafter()).generate(requests)
    engine = build_engine(shipped, config, build_drafter(drafter, DrafterConfig(capacity=10_000), warn=pytest.fail))
    for _ in range(2):
        drafted = engine.generate(requests)
        assert [c.tokens.tolist() for c in drafted] == [c.tokens.tolist() for c in plain]
    assert sum(c.steps for c in drafted) < sum(c.steps for c in plain)
    engine.close()


HELD_OUT = 20
DEPTH = 4
TWINS = {"mtp": twins.Mimo, "eagle3": twins.Eagle3}


@pytest.fixture(scope="module")
def target():
    return load_model(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def prompts():
    lines = (SHIPPED_MODEL / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()[-HELD_OUT:]
    tokenizer = Tokenizer(SHIPPED_MODEL)
    return [np.array(tokenizer.encode(json.loads(line)["prompt"])[-100:], np.uint32) for line in lines]


def as_float32(tensors):
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def first_drafts(target, kind, prompts):
    """Return the first draft of each prompt, and the text before it."""
    config = EngineConfig(max_draft=DEPTH, max_sequences=4)
    settings = configure(kind, DrafterConfig(), {"depth": str(DEPTH)})
    drafter = build_drafter(kind, settings, TargetInfo.from_model(target, config, SHIPPED_MODEL))
    found = {}

    def observe(report):
        for result in each_of(report.result):
            if result.drafted and result.sequence_id not in found:
                sequence = result.sequence
                text = sequence.tokens[: len(sequence) - len(result.tokens)].tolist()
                found[result.sequence_id] = text, result.draft.tolist()

    requests = [Request(prompt, SamplingParams(max_tokens=DEPTH + 2, ignore_eos=True)) for prompt in prompts]
    build_engine(target, config, drafter).generate(requests, observe)
    return list(found.values())


def draft_of(twin, head, target, text):
    """Return the most likely draft after a text, with dense attention over the whole text."""
    tokens = torch.tensor(text)
    _, hidden = target.hidden_states(tokens, torch.arange(len(text)), attend_densely, PLAIN, head.hidden_layers)
    states, pairs, draft = twin.target_states(hidden)[:-1], tokens[1:], []
    for _ in range(DEPTH):
        logits, outputs = twin.run(pairs, states)
        best = int(logits[-1].argmax())
        draft.append(best if head.draft_vocabulary is None else int(head.draft_vocabulary[best]))
        states, pairs = torch.cat((states, outputs[-1:])), torch.cat((pairs, torch.tensor(draft[-1:])))
    return draft


@pytest.mark.parametrize("kind", TWINS)
def test_shipped_heads_draft_the_same_tokens_as_their_twins(target, prompts, monkeypatch, kind):
    # The compiled network rounds weights to 8 bits.
    monkeypatch.setattr(build, "compile_head", lambda head: None)
    folder = SHIPPED_HEADS / kind
    head = load_head(kind, folder, target.config)
    tensors, fields = samples.read(folder)
    twin = TWINS[kind](as_float32(tensors), fields, as_float32(samples.read(SHIPPED_MODEL)[0]))
    drafts = first_drafts(target, kind, prompts)
    assert len(drafts) >= HELD_OUT - 2  # an output may end with its first token
    with torch.inference_mode():
        for text, draft in drafts:
            assert draft == draft_of(twin, head, target, text)
