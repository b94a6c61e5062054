"""Training runs continue after an interruption."""

import os

import pytest
import torch

from engine.training.kinds import KINDS, new_objective
from engine.training.objectives import read_windows
from engine.training.run import CHECKPOINT_FILE, resume, save, train
from ssd.errors import UserError
from tests.engine.training.tiny import new_target, new_windows, tiny_recipe

pytestmark = pytest.mark.parametrize("kind", KINDS)


@pytest.fixture(scope="module")
def target():
    return new_target()


def weights(run):
    return {name: tensor.clone() for name, tensor in run.module.state_dict().items()}


def test_the_loss_falls_and_the_target_stays(kind, target, tmp_path):
    recipe, kept = tiny_recipe(kind, steps=30), {name: each.clone() for name, each in target.state_dict().items()}
    batch = read_windows(target, new_windows(), new_objective(recipe, target, new_windows()).layers)
    run = resume(recipe, target, new_windows(), tmp_path / "run")
    with torch.no_grad():
        before = run.objective(batch)
    train(run, tmp_path / "run", until=recipe.steps, progress=lambda _run: None)
    with torch.no_grad():
        after = run.objective(batch)
    assert after.losses[0] < before.losses[0] - 0.02
    assert after.accepted.sum() > before.accepted.sum()
    assert all(torch.equal(tensor, kept[name]) for name, tensor in target.state_dict().items())


def test_a_checkpoint_is_on_disk_before_it_replaces_the_previous_one(kind, target, tmp_path, monkeypatch):
    written, fsync, path = [], os.fsync, tmp_path / CHECKPOINT_FILE
    run = resume(tiny_recipe(kind), target, new_windows(), tmp_path)

    def record(descriptor):
        fsync(descriptor)
        written.append((path.exists(), os.fstat(descriptor).st_size))

    monkeypatch.setattr(os, "fsync", record)
    save(run, tmp_path)
    assert written == [(False, path.stat().st_size)]


def test_a_damaged_checkpoint_is_named(kind, target, tmp_path):
    save(resume(tiny_recipe(kind), target, new_windows(), tmp_path), tmp_path)
    path = tmp_path / CHECKPOINT_FILE
    data = path.read_bytes()
    # Reading these raises EOFError, UnpicklingError, RuntimeError and UnicodeDecodeError.
    for damaged in (b"", bytes(100), data[: len(data) // 2], b"\x80\x02X\x01\x00\x00\x00\xff."):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match=rf"{path} cannot be read \(.+\); delete it to train from the beginning"):
            resume(tiny_recipe(kind), target, new_windows(), tmp_path)


def test_an_interrupted_run_ends_like_an_uninterrupted_one(kind, target, tmp_path):
    """No other recipe continues it."""
    recipe = tiny_recipe(kind)
    whole = resume(recipe, target, new_windows(), tmp_path / "whole")
    train(whole, tmp_path / "whole", until=recipe.steps, progress=lambda _run: None)
    for until in (5, recipe.steps):
        run = resume(recipe, target, new_windows(), tmp_path / "parts")
        train(run, tmp_path / "parts", until=until, progress=lambda _run: None)
        with pytest.raises(ValueError, match="another recipe"):
            resume(tiny_recipe(kind, seed=1), target, new_windows(), tmp_path / "parts")
    assert run.step == recipe.steps
    for name, tensor in weights(whole).items():
        assert torch.equal(tensor, weights(run)[name]), name
