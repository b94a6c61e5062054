"""Training of a tiny model: the loss decreases, runs resume, and the written folder is a model."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from engine.models.loader import load_model
from engine.training import run as run_module
from engine.training import sources
from engine.training.dataset import encode_texts, train_tokenizer
from engine.training.prompts import function_prompts
from engine.training.run import train_target
from engine.training.sources import SourceFile
from engine.training.target import Recipe, held_out_loss, resume, start, token_losses, train

TINY = Recipe(
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
    vocab_size=300,
    max_positions=64,
    total_tokens=40 * 128,
    batch_tokens=128,
    short_context=32,
    warmup_steps=5,
)

FUNCTION = """def function_{n}(argument_{n}):
    '''Return a value.'''
    result = argument_{n}
    result += 1
    print(result)
    return result
"""

FILE = "\n".join(FUNCTION.format(n=n) for n in range(30))


@pytest.fixture
def library(tmp_path, monkeypatch):
    """Make a small standard library: twelve files with the same lines and different names."""
    root = tmp_path / "lib"
    root.mkdir()
    for number in range(12):
        (root / f"module_{number}.py").write_text(
            FILE.replace("function", f"f{number}").replace("argument", f"a{number}")
        )
    monkeypatch.setattr(sources, "MAX_HELD_OUT_GROUP_SHARE", 1.0)
    for module in (run_module, __import__("engine.training.dataset", fromlist=["stdlib_root"])):
        monkeypatch.setattr(module, "stdlib_root", lambda: root)
    return root


@pytest.fixture
def text(library, tmp_path):
    from engine.training.dataset import prepare

    return prepare(tmp_path / "work", TINY.vocab_size, lambda _: None)


def weights(run):
    return {name: parameter.detach().clone() for name, parameter in run.model.named_parameters()}


def test_training_learns(text, tmp_path):
    run = start(TINY, TINY.model_config(0))
    before = held_out_loss(run.model, text.held_out, skip=4, context=64, fast=True)
    train(run, text, tmp_path, compiled=False, progress=lambda *_: None)
    after = held_out_loss(run.model, text.held_out, skip=4, context=64, fast=True)
    assert after < before - 1.0


def test_a_resumed_run_equals_an_uninterrupted_one(text, tmp_path):
    class StoppedError(Exception):
        pass

    def stop_at_20(step, loss):
        if step == 20:
            raise StoppedError

    straight = start(TINY, TINY.model_config(0))
    train(straight, text, tmp_path / "work", compiled=False, progress=lambda *_: None)
    (tmp_path / "work" / "checkpoint.pt").unlink()
    stopped = resume(TINY, TINY.model_config(0), tmp_path / "work")
    with pytest.raises(StoppedError):
        train(stopped, text, tmp_path / "work", compiled=False, progress=stop_at_20)
    from engine.training.target import save

    save(stopped, tmp_path / "work")
    resumed = resume(TINY, TINY.model_config(0), tmp_path / "work")
    assert resumed.step == 20
    train(resumed, text, tmp_path / "work", compiled=False, progress=lambda *_: None)
    for name, weight in weights(straight).items():
        assert torch.equal(weight, weights(resumed)[name]), name


def test_a_checkpoint_of_another_recipe_is_refused(text, tmp_path):
    run = start(TINY, TINY.model_config(0))
    from engine.training.target import save

    save(run, tmp_path)
    other = replace(TINY, seed=1)
    with pytest.raises(ValueError, match="another recipe"):
        resume(other, other.model_config(0), tmp_path)


def test_held_out_loss_scores_every_token_once():
    run = start(TINY, TINY.model_config(0))
    for size in (5, 64, 65, 66, 97, 200):
        tokens = np.random.default_rng(size).integers(0, 300, size).astype(np.uint16)
        half = 32
        ids = torch.from_numpy(tokens.astype(np.int64))
        expected = []
        with torch.no_grad():
            for target in range(4, size):
                # Windows begin every half context; a token is scored in the first that contains it.
                first = max(0, -(-(target - 64) // half)) * half
                context = ids[None, first:target]
                expected.append(
                    float(token_losses(run.model, context, ids[None, first + 1 : target + 1], fast=False)[-1])
                )
        assert held_out_loss(run.model, tokens, skip=4, context=64, fast=False) == pytest.approx(
            np.mean(expected), abs=1e-5
        )


def test_training_end_to_end(library, tmp_path):
    train_target(
        TINY, tmp_path / "work", tmp_path / "model", compiled=False, notify=lambda _: None, progress=lambda *_: None
    )
    folder = tmp_path / "model"
    prompts = [json.loads(line) for line in (folder / "prompts.jsonl").read_text().splitlines()]
    listed = json.loads((folder / "files.json").read_text())
    assert prompts
    assert {prompt["source"].split(":")[0] for prompt in prompts} <= set(listed["held_out"])
    assert not set(listed["held_out"]) & set(listed["train"])
    card = (folder / "README.md").read_text()
    for word in ("perplexity", "bits per byte", "Kneser-Ney", "minutes", listed["python"]):
        assert word in card
    tokenizer = AutoTokenizer.from_pretrained(folder)
    reference = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = tokenizer(prompts[0]["prompt"], return_tensors="pt").input_ids[:, :60]
    model = load_model(folder)
    from tests.engine.forward import prompt_logits

    with torch.inference_mode():
        expected = reference(ids).logits[0]
    assert (prompt_logits(model, ids[0].numpy()) - expected).abs().max() < 1e-4


def test_decoding_restores_encoded_texts():
    tokenizer = train_tokenizer([FILE], 300)
    for text in (FILE, "x = 'ünïcode \U0001f600'\n\t\r\n", " \n  \n    deep\n"):
        ids = tokenizer.encode(text).ids
        assert tokenizer.decode(ids) == text
    row = encode_texts(tokenizer, ["a", "b"])
    end = tokenizer.token_to_id("<|endoftext|>")
    assert (row == end).sum() == 3


def test_prompts_are_complete_lines_up_to_the_first_statement():
    tokenizer = train_tokenizer([FILE], 300)
    prompts = function_prompts([SourceFile("a.py", FILE)], tokenizer)
    assert prompts
    for prompt in prompts:
        assert prompt.prompt.rstrip().endswith("'''Return a value.'''")
        assert FILE.partition(prompt.prompt)[2].startswith("    result = argument_")
