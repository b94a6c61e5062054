"""The benchmark of the host's time per step."""

import json
import sys

import numpy as np
import pytest

from benchmarks.host_time import __main__ as host_time
from benchmarks.host_time.case import outcomes, run_case
from engine.engine import Engine
from engine.scheduling.kernels import FIRST_DRAFT


@pytest.mark.parametrize(("drafter", "more"), [("none", []), ("ssd", []), ("ssd", ["--mixed"]), ("ssd-remote", [])])
def test_all_outputs_are_the_recorded_ones(recorded, monkeypatch, drafter, more):
    outputs, step = [], Engine.step

    def observed(engine):
        report = step(engine)
        outputs.extend(completion.tokens for completion in report.finished.values())
        return report

    monkeypatch.setattr(Engine, "step", observed)
    figures = run_case(
        drafter, 3, host_time.build_parser().parse_args(["--trace", str(recorded), "--steps", "40", *more])
    )
    assert len(outputs) > 2
    # Each output of the recording is the second half of the same 40 tokens, later with other ids of tokens.
    assert {len(output) for output in outputs} == {20}
    assert len({tuple(map(output.tolist().index, output.tolist())) for output in outputs}) == 1
    assert outputs[0].tolist() == outputs[1].tolist()
    assert figures["tokens per step"] == 1 if drafter == "none" else figures["tokens per step"] > 2


def test_a_step_commits_the_accepted_tokens_and_one_more():
    history = np.array([[5, 6, 7, 8, 9, -1]], np.int32)
    lengths, limits = np.array([2], np.int32), np.array([5], np.int32)
    table = np.zeros((1, FIRST_DRAFT + 3), np.int32)
    table[0, :FIRST_DRAFT] = 0, 4
    table[0, FIRST_DRAFT:] = 7, 1, 1
    assert outcomes(table, lengths, limits, history, 4).tolist() == [[2, 2, 7, 8, 0, 0]]
    assert lengths[0] == 4
    # There is room for one more token.
    assert outcomes(table, lengths, limits, history, 4).tolist() == [[1, 0, 9, 0, 0, 0]]
    assert outcomes(table, lengths, limits, history, 4).tolist() == [[0, 0, 0, 0, 0, 0]]


def test_the_table_has_a_row_for_each_case(recorded, monkeypatch, capsys):
    """The first case runs in a process of its own, as all do in a measurement."""
    run_process, found = host_time.run_process, []

    def run_once(*arguments):
        found.append(found[0] if found else run_process(*arguments))
        return found[-1]

    monkeypatch.setattr(host_time, "run_process", run_once)
    arguments = ["--steps", "12", "--rounds", "1", "--trace", str(recorded), "--at-once", "1,2", "--drafters", "none"]
    monkeypatch.setattr(sys, "argv", ["host_time", *arguments])
    host_time.main()
    output = capsys.readouterr().out
    rows = json.loads(output.splitlines()[-1])["rows"]
    assert [(row["at once"], row["drafter"]) for row in rows] == [(1, "none"), (2, "none")]
    assert all(0 < row["median"] <= row["p90"] for row in rows)
    assert "us per sequence" in output
