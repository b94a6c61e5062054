"""The steps that the benchmark of tree attention times, and what it says without a GPU."""

import pytest
import torch

from benchmarks.gpu.stepping import binary_tree, path
from benchmarks.tree_attention import draft_batch, main
from engine.attention.layout import cut


@pytest.mark.parametrize("shape", [path, binary_tree])
def test_steps_verify_as_many_tokens_in_either_shape(shape):
    batch = draft_batch(100, shape(32), 2)
    assert [(piece.length, piece.context) for piece in cut(batch)] == [(33, 100)] * 2
    assert all((piece.sees is not None) == (shape is binary_tree) for piece in cut(batch))
    assert len(set(batch.slots.tolist())) == len(batch.slots)


def test_it_says_what_it_lacks(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit):
        main([])
    assert "a CUDA device is needed" in capsys.readouterr().err


@pytest.mark.gpu
def test_it_runs(capsys):
    pytest.importorskip("flashinfer")
    main(["--contexts", "64", "--nodes", "8"])
    assert '"tree, merged"' in capsys.readouterr().out
