"""The heads that ship with the package draft the same tokens as another implementation of their published format."""

import json

import numpy as np
import pytest
import torch

from engine.config import EngineConfig
from engine.drafters import build
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter, configure
from engine.engine import build_engine
from engine.models.heads.formats import load_head
from engine.models.loader import load_model
from engine.models.ops import PLAIN
from engine.models.shipped import PROMPTS_FILE, SHIPPED_HEADS, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.drafters.toy import attend_densely
from tests.engine.models.heads import published, twins
from tests.engine.steps import each_of

PROMPTS = 20
DEPTH = 4
TWINS = {"mtp": twins.Mimo, "eagle3": twins.Eagle3}


@pytest.fixture(scope="module")
def target():
    return load_model(SHIPPED_MODEL)


@pytest.fixture(scope="module")
def prompts():
    lines = (SHIPPED_MODEL / PROMPTS_FILE).read_text(encoding="utf-8").splitlines()[-PROMPTS:]
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
    tensors, fields = published.read(folder)
    twin = TWINS[kind](as_float32(tensors), fields, as_float32(published.read(SHIPPED_MODEL)[0]))
    drafts = first_drafts(target, kind, prompts)
    assert len(drafts) >= PROMPTS - 2  # an output may end with its first token
    with torch.inference_mode():
        for text, draft in drafts:
            assert draft == draft_of(twin, head, target, text)
