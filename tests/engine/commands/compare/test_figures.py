"""Figures of drafts, against drafts whose fate is known and against counting anew."""

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from engine.commands.compare import results
from engine.commands.compare.results import (
    Figures,
    Output,
    Step,
    find_loops,
    groups,
    run_group,
)
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from tests.engine.drafters.networks import new_drafter
from tests.engine.steps import each_of
from tests.engine.trees import ScriptedDrafter

PROMPT = np.arange(1, 20, dtype=np.uint32)
LENGTH = 24


def requests(count=3, spare=17, **sampling):
    params = [SamplingParams(LENGTH + spare, ignore_eos=True, seed=seed, **sampling) for seed in range(count)]
    return [Request(np.append(PROMPT, np.uint32(seed)), each) for seed, each in enumerate(params)]


def test_tokens_per_step_and_acceptance_of_known_drafts(model):
    submitted = requests(spare=40)
    plain = build_engine(model, EngineConfig(max_sequences=3), NoDrafter()).generate(submitted)
    texts = [np.concatenate((r.prompt, c.tokens)) for r, c in zip(submitted, plain, strict=True)]

    def two_right_and_two_wrong(number, length):
        right = texts[number][length : length + 4]
        return [*right[:2], *((right[2:] + 1) % 300)]

    engine = build_engine(model, EngineConfig(max_sequences=3), ScriptedDrafter(two_right_and_two_wrong))
    outputs = run_group(engine, requests(), LENGTH)
    figures = Figures.of(outputs, LENGTH, has_loops=False)
    # Every step commits two draft tokens and the target's own; none is cut short by the end of the output.
    assert figures.tokens_per_step == 3
    assert figures.drafted_per_step == 4
    assert figures.accept_by_position == [1, 1, 0, 0]
    assert figures.drafted_by_position == [1, 1, 1, 1]
    assert figures.tokens_per_step_no_loops is None
    for output, completion in zip(outputs, plain, strict=True):
        assert np.array_equal(output.tokens[:LENGTH], completion.tokens[:LENGTH])
        assert len(output.tokens) < LENGTH + 3  # cancelled


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_figures_equal_those_counted_from_step_reports(model, temperature):
    config = EngineConfig(max_sequences=3, draft_shape="tree")
    engine = build_engine(model, config, new_drafter("self", model, config))
    reports = []
    outputs = run_group(engine, requests(temperature=temperature), LENGTH, reports.append)
    figures = Figures.of(outputs, LENGTH, has_loops=False)
    done, tokens, steps, drafted, accepted = {}, 0, 0, 0, 0
    for report in reports:
        for result in each_of(report.result):
            before = done.get(result.sequence_id, 0)
            done[result.sequence_id] = before + len(result.tokens)
            if before > 0:
                tokens, steps = tokens + len(result.tokens), steps + 1
                drafted, accepted = drafted + result.drafted, accepted + len(result.kept)
    assert drafted > 3 * steps  # trees
    assert accepted > 0
    assert figures.tokens_per_step == pytest.approx(tokens / steps)
    assert figures.drafted_per_step == pytest.approx(drafted / steps)
    assert sum(figures.accept_by_position) == pytest.approx(accepted / steps)
    assert sum(figures.drafted_by_position) == pytest.approx(drafted / steps)


def test_steps_within_loops_are_left_out():
    loop = [7, 8] * 20
    tokens = [*range(100, 110), *loop]
    steps = [Step(1, 4, 3, (1, 1, 1)), Step(5, 4, 3, (2, 1, 1)), Step(9, 1, 0, ()), Step(12, 9, 8, (1,) * 8)]
    output = Output(tokens, steps)
    assert Figures.of([output], 50, has_loops=True).tokens_per_step == pytest.approx(18 / 4)
    assert Figures.of([output], 50, has_loops=True).tokens_per_step_no_loops == pytest.approx(3)
    figures = Figures.of([output], 10, has_loops=True)  # later steps do not count
    assert figures.tokens_per_step == pytest.approx(3)
    assert figures.drafted_by_position == pytest.approx([1, 2 / 3, 2 / 3])


def test_groups_have_every_request_once():
    assert list(groups([*range(7)], 3)) == [[0, 1, 2], [3, 4, 5], [6]]


def naive_loop_tokens(tokens):
    looping = set()
    for last in range(len(tokens)):
        run = range(last - results.LOOP_TOKENS + 1, last + 1)
        for period in range(1, results.LOOP_PERIOD + 1):
            if run[0] >= period and all(tokens[i] == tokens[i - period] for i in run):
                looping.update(run)
    return len(looping)


@given(st.lists(st.integers(0, 3), max_size=15), st.lists(st.integers(0, 3), min_size=1, max_size=9), st.integers(0, 6))
@example([*range(9)] * 2, [0], 0)  # The period is too long.
def test_loop_tokens_are_counted(start, period, times):
    tokens = start + period * times
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(results, "LOOP_TOKENS", 5)
        patch.setattr(results, "LOOP_PERIOD", 8)
        assert find_loops(np.array(tokens, np.uint32)).sum() == naive_loop_tokens(tokens)
