import json
import random
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.commands.demo.measure import LOOP_PERIOD, LOOP_TOKENS, count_loop_tokens
from engine.commands.demo.workload import edit_beginning, make_workload, read_prompts
from ssd.errors import UserError

PROMPTS = [(f"file.py:f{number}", f"import os\n\n\ndef f{number}(x):\n    y = {number}\n") for number in range(130)]


@given(st.integers(0, 20))
def test_shares_are_kept_and_repeats_follow_what_they_repeat(seed):
    items = make_workload(PROMPTS, 300, seed)
    assert Counter(item.kind for item in items) == {"exact repeat": 90, "near repeat": 90, "new": 120}
    seen = {}
    for item in items:
        if item.kind == "new":
            assert item.source not in seen
            seen[item.source] = item.prompt
        elif item.kind == "exact repeat":
            assert item.prompt == seen[item.source]
        else:
            assert item.prompt != seen[item.source]
            assert item.prompt.splitlines()[-1] == seen[item.source].splitlines()[-1]


def test_the_longer_it_runs_the_more_was_seen_before():
    new = np.array([[item.kind == "new" for item in make_workload(PROMPTS, 300, seed)] for seed in range(20)])
    assert new[:, :30].mean() > 0.7
    assert 0.1 < new[:, -30:].mean() < 0.4


def test_repeats_draw_like_what_they_repeat():
    items = make_workload(PROMPTS, 300, 0)
    assert len({(item.source, item.seed) for item in items}) == len({item.seed for item in items}) == 120


def test_the_seed_decides():
    assert make_workload(PROMPTS, 50, 1) == make_workload(PROMPTS, 50, 1)
    assert make_workload(PROMPTS, 50, 1) != make_workload(PROMPTS, 50, 2)


def test_an_edit_leaves_most_of_a_prompt():
    prompt = "".join(f"line {number}\n" for number in range(12))
    for seed in range(50):
        edited = edit_beginning(prompt, random.Random(seed))
        assert edited.startswith("#")
        assert edited.endswith("".join(f"line {number}\n" for number in range(4, 12)))


def test_too_few_prompts_and_broken_files_are_refused(tmp_path):
    with pytest.raises(UserError, match="need 40 prompts; the file has 5"):
        make_workload(PROMPTS[:5], 100, 0)
    path = tmp_path / "prompts.jsonl"
    for text in ("{", "[]", json.dumps({"prompt": "x"}), json.dumps({"prompt": 5, "source": "x"})):
        path.write_text(text + "\n")
        with pytest.raises(UserError, match="no file of prompts"):
            read_prompts(path)


def naive_loop_tokens(tokens):
    looping = set()
    for last in range(len(tokens)):
        run = range(last - LOOP_TOKENS + 1, last + 1)
        for period in range(1, LOOP_PERIOD + 1):
            if run[0] >= period and all(tokens[i] == tokens[i - period] for i in run):
                looping.update(run)
    return len(looping)


@given(
    st.lists(st.integers(0, 9), max_size=40), st.lists(st.integers(0, 9), min_size=1, max_size=30), st.integers(0, 4)
)
def test_loop_tokens_are_counted(start, period, times):
    tokens = start + period * times
    assert count_loop_tokens(np.array(tokens, np.uint32)) == naive_loop_tokens(tokens)


def test_a_loop_is_found_and_plain_text_is_not():
    assert count_loop_tokens(np.arange(128, dtype=np.uint32)) == 0
    assert count_loop_tokens(np.array([1, 2] * 30, np.uint32)) == 58
