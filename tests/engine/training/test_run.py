"""Training runs continue after an interruption."""

import pytest
import torch

from engine.training.kinds import KINDS, new_objective
from engine.training.objectives import read_windows
from engine.training.run import resume, train
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
