"""Stored hidden states are the target's, and an interrupted computation continues."""

import numpy as np
import pytest
import torch

from engine.training import features as module
from engine.training.features import Features, window_states
from tests.engine.training.tiny import new_target, new_windows

LAYERS = (1, 3, 4)


@pytest.fixture
def small_shards(monkeypatch):
    monkeypatch.setattr(module, "SHARD_WINDOWS", 4)
    monkeypatch.setattr(module, "BATCH_TOKENS", 48)  # two windows


@pytest.mark.usefixtures("small_shards")
def test_windows_return_the_states_of_the_target(tmp_path):
    target, windows = new_target(), new_windows(10)
    features = Features.open(tmp_path, target, LAYERS, windows, 10)
    done = list(features.compute(target))
    assert done == sorted(done)
    assert done[-1] == windows.size
    picked = features.windows(np.array([7, 0, 9]), (1, 4))
    assert picked.tokens.tolist() == windows[[7, 0, 9]].tolist()
    expected = window_states(target, picked.tokens, (1, 4))
    torch.testing.assert_close(picked.states, expected, rtol=1e-2, atol=1e-2)
    files = sum(path.stat().st_size for path in features.folder.glob("*.npy"))
    assert features.size <= files < features.size + 1024


@pytest.mark.usefixtures("small_shards")
def test_an_interrupted_computation_continues_with_the_missing_shards(tmp_path):
    target, windows = new_target(), new_windows(10)
    features = Features.open(tmp_path, target, LAYERS, windows, 10)
    computing = features.compute(target)
    for _ in range(3):
        next(computing)
    computing.close()
    again = Features.open(tmp_path, target, LAYERS, windows, 10)
    assert again.missing() == [1, 2]
    assert next(again.compute(target)) > 4 * windows.shape[1]


@pytest.mark.usefixtures("small_shards")
def test_another_text_or_more_layers_need_another_folder(tmp_path):
    target, windows = new_target(), new_windows(10)
    features = Features.open(tmp_path, target, LAYERS, windows, 4)
    assert len(features.tokens) == 4
    assert Features.open(tmp_path, target, (4,), windows, 10).folder == features.folder
    assert Features.open(tmp_path, target, (2, 4), windows, 10).folder != features.folder
    assert Features.open(tmp_path, target, LAYERS, windows + 1, 10).folder != features.folder
