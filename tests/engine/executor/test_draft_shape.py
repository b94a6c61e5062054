"""Choice of the draft shape from step times."""

from dataclasses import replace

import pytest

from engine.executor import draft_shape
from engine.executor.draft_shape import DRAFT_TOKENS, StepRatios, choose_draft_shape, faster_shape


@pytest.mark.parametrize(
    ("cost", "tree_factor", "shape"),
    [
        (0.0, 1.10, "tree"),
        (0.0, 1.11, "path"),
        (0.005, 1.10, "tree"),
        (0.02, 1.01, "tree"),
        (0.02, 1.03, "path"),
        (0.1, 1.0, "path"),
        (0.1, 0.95, "tree"),
        (1.0, 1.0, "path"),
        (-0.01, 1.05, "tree"),  # Noise: the longer step was faster.
    ],
)
def test_trees_are_chosen_if_their_gain_exceeds_their_cost(cost, tree_factor, shape):
    assert faster_shape(StepRatios(1 + DRAFT_TOKENS * cost, tree_factor)) == shape


def test_models_with_a_tiny_context_window_use_paths(model, monkeypatch):
    monkeypatch.setattr(model, "config", replace(model.config, max_positions=8))
    assert choose_draft_shape(model, "plain") == "path"


def test_all_three_kinds_of_steps_are_timed(model, monkeypatch):
    measured = []
    monkeypatch.setattr(draft_shape, "faster_shape", lambda steps: measured.append(steps) or "tree")
    batches = []
    run = draft_shape._run
    monkeypatch.setattr(draft_shape, "_run", lambda runner, batch: batches.append(batch) or run(runner, batch))
    assert choose_draft_shape(model, "plain") == "tree"
    assert all(0.01 < ratio < 100 for ratio in measured[0])
    assert [(batch.spans[0].length, batch.spans[0].tree is None) for batch in batches[:3]] == [
        (1, True), (1 + DRAFT_TOKENS, True), (1 + DRAFT_TOKENS, False)
    ]  # fmt: skip
