"""Files of step durations, profiles from data sheets, and the speed-ups that follow from them."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.drafters.registry import KINDS
from ssd.budget.cost_profile import VERSION, CostProfile
from ssd.budget.roofline import GPUS, SIZES, roofline
from ssd.errors import UserError

PROFILE = CostProfile(
    "a device",
    "a model",
    {1: {1: 10.0}, 2: {1: 11.0, 2: 12.0}, 4: {1: 12.0, 2: 14.0}, 8: {2: 20.0}},
    {"mtp": {1: {1: 2.0, 2: 3.0}, 4: {1: 5.0}}, "ssd": {0: {1: 0.5}}},
)


def test_a_profile_is_read_as_it_was_written_without_unknown_fields(tmp_path):
    PROFILE.write(tmp_path / "profile.json")
    assert CostProfile.read(tmp_path / "profile.json") == PROFILE
    document = json.loads((tmp_path / "profile.json").read_text())
    assert document["version"] == VERSION
    assert {"device", "model", "step_ms", "drafter_ms"} <= set(document)
    assert document["step_ms"]["2"]["1"] == 11.0
    (tmp_path / "profile.json").write_text(json.dumps(document | {"later": 1}))
    assert CostProfile.read(tmp_path / "profile.json") == PROFILE


@pytest.mark.parametrize(
    ("tokens", "sequences", "expected"),
    [(1, 1, 10), (3, 1, 11.5), (6, 1, 13), (4, 2, 14), (6, 2, 17), (10, 2, 23), (1, 2, 11), (4, 8, 14)],
)
def test_steps_between_and_beyond_measured_sizes(tokens, sequences, expected):
    assert PROFILE.step(tokens, sequences) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("drafter", "depth", "sequences", "expected"),
    [
        ("mtp", 1, 1, 2),
        ("mtp", 2, 1, 3),
        ("mtp", 7, 1, 8),
        ("mtp", 1, 2, 3),
        ("ssd", 9, 1, 0.5),  # its depth cannot be set
        ("ssd+mtp", 4, 1, 5.5),
        ("ngram+mtp", 4, 1, 5),
        ("ngram", 4, 1, None),
    ],
)
def test_time_of_drafting(drafter, depth, sequences, expected):
    assert PROFILE.drafting(drafter, depth, sequences) == (None if expected is None else pytest.approx(expected))


@given(st.floats(1, 6), st.floats(0, 8), st.floats(0, 50))
def test_the_speedup_is_the_ratio_of_times_per_token(tokens, drafted, drafting_ms):
    for sequences in (1, 2):
        plain_ms_per_token = PROFILE.step(sequences, sequences) / sequences
        step_ms = PROFILE.step(sequences + sequences * drafted, sequences) + drafting_ms
        expected = plain_ms_per_token / (step_ms / (sequences * tokens))
        assert PROFILE.speedup(tokens, drafted, drafting_ms, sequences) == pytest.approx(expected)


def test_prompts_are_computed_in_the_largest_steps():
    profile = CostProfile("device", "model", {1: {1: 10.0}, 100: {1: 20.0, 4: 24.0}, 200: {}})
    assert profile.prompt_token_ms == 0.2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"version": VERSION + 1}, f"has version {VERSION + 1}"),
        ({"step_ms": {}}, "step_ms is empty"),
        ({"step_ms": {"1": {"0": 1.0}}}, "out of range"),
        ({"step_ms": {"1": {"1": float("nan")}}}, "out of range"),
        ({"step_ms": {"1": {"1": 0.0}}}, "a step takes 0 ms"),
        ({"step_ms": {str(size): {"1": 1.0} for size in range(65)}}, "step_ms has 65 sizes; the maximum is 64"),
        ({"step_ms": [1]}, "is not a cost profile"),
        ({"drafter_ms": {"mtp": 1}}, "is not a cost profile"),
        ({"source": "guessed"}, "source must be one of"),
        ({"device": None, "step_ms": None}, "is not a cost profile"),
    ],
)
def test_unusable_files_are_refused(tmp_path, change, message):
    path = tmp_path / "profile.json"
    PROFILE.write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(UserError, match=message):
        CostProfile.read(path)


def test_missing_fields_and_files_are_refused(tmp_path):
    path = tmp_path / "profile.json"
    for content, message in ((None, "cannot read"), ("{", "cannot read"), ('{"version": 1}', "'device' is missing")):
        if content is not None:
            path.write_text(content)
        with pytest.raises(UserError, match=message):
            CostProfile.read(path)
    with pytest.raises(UserError, match="cannot write"):
        PROFILE.write(tmp_path / "none" / "profile.json")


# --- Profiles from data sheets


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("size", SIZES)
def test_rooflines_grow_with_the_step_and_the_depth(gpu, size):
    profile = roofline(gpu, size)
    steps = [profile.step(tokens, 1) for tokens in (1, 16, 256, 4096)]
    assert steps == sorted(steps)
    assert steps[-1] > 2 * steps[0]  # limited by arithmetic
    assert profile.source == "roofline"
    for kind in profile.drafter_ms:
        assert kind in KINDS
        assert profile.drafting(kind, 2, 1) == pytest.approx(2 * profile.drafting(kind, 1, 1))
        assert profile.drafting(kind, 1, 1) < profile.step(1, 1)


def test_a_roofline_is_bandwidth_for_small_steps_and_arithmetic_for_large_ones():
    profile = roofline("h100", "8b")
    cache = 1024 * 32 * 2048
    assert profile.step(1, 1) == pytest.approx(1e3 * 2 * (7.5e9 + cache) / 3.35e12)
    assert profile.step(4096, 1) == pytest.approx(1e3 * 2 * 7.5e9 * 4096 / 989e12)


def test_unknown_names_are_refused():
    with pytest.raises(UserError, match="--gpu z: unknown"):
        roofline("z", "8b")
