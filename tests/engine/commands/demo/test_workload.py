"""Shares, order and edits of the workload."""

import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.demo.workload import edit_beginning, make_workload
from engine.commands.prompts import read_texts
from ssd.errors import UserError

PROMPTS = [f"import os\n\n\ndef f{number}(x):\n    y = {number}\n" for number in range(130)]


@given(st.integers(0, 20))
def test_shares_are_exact_and_repeats_follow_their_originals(seed):
    items = make_workload(PROMPTS, 300, seed)
    assert Counter(item.kind for item in items) == {"exact repeat": 90, "near repeat": 90, "new": 120}
    seen = {}
    for item in items:
        if item.kind == "new":
            assert item.seed not in seen
            seen[item.seed] = item.prompt
        elif item.kind == "exact repeat":
            assert item.prompt == seen[item.seed]
        else:
            assert item.prompt != seen[item.seed]
            assert item.prompt.splitlines()[-1] == seen[item.seed].splitlines()[-1]


def test_the_share_of_repeats_grows():
    new = np.array([[item.kind == "new" for item in make_workload(PROMPTS, 300, seed)] for seed in range(20)])
    assert new[:, :30].mean() > 0.7
    assert 0.1 < new[:, -30:].mean() < 0.4


def test_repeats_have_the_seed_of_their_original():
    items = make_workload(PROMPTS, 300, 0)
    assert sorted(item.seed for item in items if item.kind == "new") == list(range(120))
    assert {item.seed for item in items if item.kind != "new"} <= set(range(120))


def test_the_seed_determines_the_workload():
    assert make_workload(PROMPTS, 50, 1) == make_workload(PROMPTS, 50, 1)
    assert make_workload(PROMPTS, 50, 1) != make_workload(PROMPTS, 50, 2)


def test_an_edit_keeps_most_of_a_prompt():
    prompt = "".join(f"line {number}\n" for number in range(12))
    for seed in range(50):
        edited = edit_beginning(prompt, random.Random(seed))
        assert edited.startswith("#")
        assert edited.endswith("".join(f"line {number}\n" for number in range(4, 12)))


def test_too_few_prompts_and_damaged_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="need 40 prompts; the file has 5"):
        make_workload(PROMPTS[:5], 100, 0)
    path = tmp_path / "prompts.jsonl"
    for text in ("{", "[]", json.dumps({"text": "x"}), json.dumps({"prompt": [5]}), json.dumps({"prompt": " "})):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match="prompt"):
            read_texts(path)
