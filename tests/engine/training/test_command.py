"""`ssd-engine train KIND` writes a folder that the engine drafts with."""

import json
import platform
import sysconfig
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from engine.models.loader import load_config, load_model
from engine.models.tokenizer import Tokenizer
from engine.training import acceptance, command, data, run
from engine.training.command import TrainingOptions, train_head
from engine.training.features import Features
from engine.training.recipe import RECIPES
from ssd.errors import UserError
from tests.engine.conftest import TEXT, VOCAB, make_folder

WINDOW = 32


def recipe(kind):
    changes = {"window": WINDOW, "batch_windows": 2, "draft_vocabulary": 200, "depth": 2, "num_layers": 1}
    return replace(RECIPES[kind], total_tokens=8 * 2 * WINDOW, **changes)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "target"
    make_folder(folder, num_hidden_layers=3)
    prompts = [{"prompt": TEXT[:60]}, {"prompt": TEXT[20:90]}]
    (folder / "prompts.jsonl").write_text("".join(json.dumps(prompt) + "\n" for prompt in prompts))
    (folder / "LICENSE.txt").write_text("the license")
    return folder


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch):
    monkeypatch.setattr(command, "MEASUREMENTS", 2)
    monkeypatch.setattr(acceptance, "MAX_TOKENS", 8)
    monkeypatch.setattr(data, "OUTPUT_BATCH", 4)
    monkeypatch.setattr(data, "OUTPUT_TOKENS", 32)


@pytest.fixture
def text_files(tmp_path):
    (tmp_path / "one.py").write_text(TEXT * 3)
    (tmp_path / "two.jsonl").write_text("".join(json.dumps({"prompt": "def ", "text": TEXT}) + "\n" for _ in range(2)))
    return str(tmp_path / "one.py"), str(tmp_path / "two.jsonl")


def options(kind, target, tmp_path, **changes):
    return TrainingOptions(kind, target, tmp_path / "out", tmp_path / "work", **changes)


@pytest.mark.parametrize("kind", RECIPES)
def test_the_written_folder_drafts_for_the_target(kind, target, text_files, tmp_path):
    chosen = options(kind, target, tmp_path, data=text_files)
    result = train_head(chosen, Console(quiet=True), recipe(kind))
    assert 1 <= result.tokens_per_step <= 5
    card = (chosen.out / "README.md").read_text()
    assert f"--drafter {kind}" in card
    assert f"{result.tokens_per_step:.2f}" in card
    assert (chosen.out / "LICENSE.txt").read_text() == "the license"
    if kind == "draft-model":
        assert load_config(chosen.out) == replace(load_config(target), num_layers=1)


def test_a_second_call_continues_and_reuses_hidden_states(target, text_files, tmp_path, monkeypatch):
    chosen = options("eagle3", target, tmp_path, data=text_files)
    train_head(chosen, Console(quiet=True), recipe("eagle3"))
    monkeypatch.setattr(Features, "compute", lambda *_: pytest.fail("computed again"))
    train_head(replace(chosen, kind="mtp"), Console(quiet=True), recipe("mtp"))
    monkeypatch.setattr(run, "_step", lambda *_: pytest.fail("trained again"))
    train_head(chosen, Console(quiet=True), recipe("eagle3"))


def test_the_target_writes_its_own_training_text(target, tmp_path):
    chosen = options("mtp", target, tmp_path, data=("self",), prompts=(target / "prompts.jsonl",))
    train_head(chosen, Console(quiet=True), recipe("mtp"))
    [path] = (chosen.work / "outputs").iterdir()
    outputs = path.read_text().splitlines()
    assert sum(len(json.loads(line)) for line in outputs) >= recipe("mtp").total_tokens
    assert all(0 <= token < VOCAB for line in outputs for token in json.loads(line))
    assert "own outputs" in (chosen.out / "README.md").read_text()


def test_own_outputs_of_a_prompt_are_on_one_side_and_not_used_for_others(target, tmp_path):
    model, tokenizer = load_model(target), Tokenizer(target)
    texts = []
    for prompts in ([TEXT[:60], TEXT[20:90]], [TEXT[5:65], TEXT[30:99]]):
        tokens = [tokenizer.encode(prompt) for prompt in prompts]
        texts.append(data.own_outputs(model, tokens, 500, tmp_path / "outputs", lambda _: None))
        held_out, trained = (tokenizer.decode(tokens) for tokens in (texts[-1].held_out, texts[-1].train))
        assert prompts[0] in held_out
        assert prompts[0] not in trained
        assert prompts[1] in trained
        assert prompts[1] not in held_out
    assert len(list((tmp_path / "outputs").iterdir())) == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, "give --data"),
        ({"data": ("self",)}, "need each other"),
        ({"data": ("missing.txt",)}, "cannot read missing.txt"),
        ({"data": ("self", "more.txt")}, "cannot be combined"),
        ({"kind": "other", "data": ("text",)}, "unknown kind"),
    ],
)
def test_unusable_options_are_refused(target, tmp_path, changes, message):
    with pytest.raises(UserError, match=message):
        train_head(options(changes.pop("kind", "mtp"), target, tmp_path, **changes), Console(quiet=True))


def test_unusable_text_is_refused(target, tmp_path):
    (tmp_path / "short.txt").write_text("short")
    (tmp_path / "bad.jsonl").write_text('{"other": 1}\n')
    for name, message in (("short.txt", "fewer than a window"), ("bad.jsonl", "line 1")):
        with pytest.raises(UserError, match=message):
            train_head(options("mtp", target, tmp_path, data=(str(tmp_path / name),)), Console(quiet=True))


def test_the_text_of_the_shipped_target_is_that_of_the_files_it_names(target, tmp_path):
    """Library files are named by their path; each is surrounded by the end token."""
    sides = {"train": ["this.py", "json/__init__.py"], "held_out": ["antigravity.py"]}
    files = {"python": platform.python_version()} | sides
    (tmp_path / "files.json").write_text(json.dumps(files))
    tokenizer, root = Tokenizer(target), Path(sysconfig.get_path("stdlib"))
    text = data.library_text(tmp_path, tokenizer, 0)
    for tokens, names in zip((text.train, text.held_out), sides.values(), strict=True):
        parts = [tokenizer.decode(part) for part in np.split(tokens, np.flatnonzero(tokens == 0))]
        assert [part for part in parts if part] == [(root / name).read_text() for name in names]
        assert (tokens[0], tokens[-1], tokens.dtype) == (0, 0, np.uint32)
    (tmp_path / "files.json").write_text(json.dumps(files | {"python": "3.0.0"}))
    with pytest.raises(UserError, match=r"standard library of Python 3\.0\.0, and this is Python"):
        data.library_text(tmp_path, tokenizer, 0)
