"""Steps on several ranks, each a real process. If one ends, every rank prints one line, and no process waits."""

import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from engine.commands.launch import launch, load
from engine.commands.options import EngineOptions
from engine.executor.ranks.leader import Cache
from engine.executor.ranks.load import check_ranks
from engine.executor.runner import open_runner
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from engine.speculation.draft_tree import DraftTree
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.forward import PAGE_SIZE, sequence_of
from tests.engine.steps import batch_of

PATTERN = np.random.default_rng(2).integers(1, VOCAB, 12).astype(np.uint32)
"""Prompts repeat it, so that drafters find something to draft."""


def options_of(folder, count=1, drafter="none", shape="path", **draft_folders):
    return EngineOptions(
        folder=folder, device="cpu", drafter=drafter, draft_folders=draft_folders, threads=1, tensor_parallel=count,
        max_sequences=4, max_draft=8, kv_memory_mib=4, draft_shape=shape,
    )  # fmt: skip


TIMEOUT_S = 60
LEADER = """
import signal
import sys
from pathlib import Path
import torch
from engine.executor.ranks.load import load_ranks
if __name__ == "__main__":
    model = load_ranks(Path(sys.argv[1]), 2, dtype=torch.float32, device="cpu", threads=1)
    print(model.group.processes[0].pid, flush=True)
    signal.pause()
"""


def test_a_step_fails_with_one_line_if_a_rank_was_killed(model_folder, capfd):
    """Runs before the fixture of divided models, since a process belongs to one group at a time."""
    options = options_of(model_folder, 4)
    model = load(options)
    engine = launch(model, Tokenizer(options.folder), options, print, lambda _: None)
    engine.add(Request(PATTERN))
    engine.step()
    os.kill(model.group.processes[1].pid, signal.SIGKILL)

    def run():
        for _ in range(5):
            engine.step()

    with pytest.raises(UserError, match="rank 2 of 4 was killed by SIGKILL, and the engine cannot run without it"):
        run()
    model.group.close()
    assert not any(process.is_alive() for process in model.group.processes)
    printed = [line.split(":")[:2] for line in capfd.readouterr().err.splitlines()]
    # A rank that is told to stop before it notices prints nothing.
    expected = [["error", f" rank {rank} of 4 has lost another rank"] for rank in (1, 3)]
    assert all(line in expected for line in printed)
    assert len(printed) == len({line[1] for line in printed})


@pytest.mark.parametrize("rank", [0, 1])
def test_an_idle_engine_ends_with_one_line_if_a_rank_was_killed(tmp_path, model_folder, rank):
    script = tmp_path / "leader.py"
    script.write_text(LEADER)
    process = subprocess.Popen(
        [sys.executable, script, model_folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    other = int(process.stdout.readline())
    os.kill([process.pid, other][rank], signal.SIGKILL)
    _, printed = process.communicate(timeout=TIMEOUT_S)  # returns when both processes have closed stderr
    if rank == 0:
        assert printed == "error: rank 1 of 2: rank 0 has ended\n"
    else:
        assert printed.startswith("error: rank 1 of 2 was killed by SIGKILL")
        assert printed.count("\n") == 1
        assert process.returncode == 1


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model with more query heads than ranks; with one per key head and rank, attention rounds differently."""
    path = tmp_path_factory.mktemp("models")
    make_folder(path, num_attention_heads=8)
    return path


@pytest.fixture(scope="module", params=[2, 4])
def divided(request, folder):
    """A model with 2 key heads, on 2 ranks and on 4."""
    model = load(options_of(folder, request.param))
    yield model
    model.group.close()


def complete(model, options, submitted):
    """Run requests together."""
    engine = launch(model, Tokenizer(options.folder), options, print, lambda _: None, verifies_all=True)
    completions = engine.generate(submitted)
    engine.close()
    return completions


def tokens(completions):
    return [each.tokens.tolist() for each in completions]


@pytest.mark.parametrize("divided", [4], indirect=True)
def test_outputs_equal_those_of_one_process(divided, folder, draft_folders):
    submitted = [
        Request(np.tile(PATTERN[: 6 + index], 4), SamplingParams(max_tokens=40, temperature=temperature, seed=index))
        for index, temperature in enumerate((0.0, 0.0, 0.7))
    ]
    alone = options_of(folder)
    expected = tokens(complete(load(alone), alone, submitted))
    for drafter, shape in (("ssd", "path"), ("ssd", "tree"), ("eagle", "tree")):
        folders = {drafter: draft_folders[drafter]} if drafter in draft_folders else {}
        # The second time, `ssd` knows the answers.
        completions = complete(divided, options_of(folder, drafter=drafter, shape=shape, **folders), 2 * submitted)
        assert tokens(completions) == 2 * expected
        assert sum(each.accepted for each in completions) > 0 or drafter != "ssd"


def test_logits_equal_those_of_one_process(divided, folder):
    """Compare the logits of a prompt, and those of a draft tree after it."""
    text, nodes = np.resize(PATTERN, 60), np.arange(6, dtype=np.int32)
    plans = [
        sequence_of(text, range(8), scheduled=59),
        sequence_of(text, range(8), computed=59, draft=PATTERN[:6], tree=DraftTree((nodes - 1) // 2)),
    ]
    whole = load(options_of(folder))
    cache = Cache("plain", 9, PAGE_SIZE)
    runners = [open_runner(model, cache) for model in (whole, divided)]
    for plan in plans:
        expected, got = (runner.forward(batch_of([plan], PAGE_SIZE)) for runner in runners)
        assert got.shape == expected.shape
        if len(expected):
            assert (got - expected).abs().max() < 1e-5 * expected.abs().max()


def test_a_token_alone_and_in_a_draft_has_the_same_logits(divided):
    """Sums over ranks are in the same order for any number of tokens."""
    runner = open_runner(divided, Cache("plain", 9, PAGE_SIZE))
    text = np.resize(PATTERN, 40)
    whole = runner.forward(batch_of([sequence_of(text[:1], range(8), draft=text[1:])], PAGE_SIZE))
    for length in (1, 2, 30):
        alone = runner.forward(batch_of([sequence_of(text[:length], range(8), computed=length - 1)], PAGE_SIZE))
        assert (alone[0] == whole[length - 1]).all()


@pytest.mark.parametrize(
    ("device", "reason"), [("cuda", "needs 4 GPUs, but there are 2"), ("cuda:1", "give --device cuda, not cuda:1")]
)
def test_gpus_are_counted_before_anything_is_loaded(monkeypatch, folder, device, reason):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(UserError, match=reason):
        check_ranks(folder, 4, torch.bfloat16, device)
