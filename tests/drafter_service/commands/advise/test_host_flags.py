"""The flags of vLLM that `advise` prints."""

import json
import shlex

import pytest

from drafter_service.commands.advise.host_flags import PaddedSpeedup, ranges_of, vllm_flags


def padded(*rows):
    return [PaddedSpeedup(length, count, speedup) for count, length, speedup in rows]


def parsed(flags):
    words = shlex.split(flags)
    return words, json.loads(words[words.index("--speculative-config") + 1])


def test_drafts_of_any_length_need_synchronous_scheduling():
    words, settings = parsed(vllm_flags(2.0, 32, padded((1, 16, 1.9), (16, 8, 1.5)), concurrency=16))
    assert words[:3] == ["--no-async-scheduling", "--scheduler-cls", "drafter_service.plugins.vllm.Scheduler"]
    assert settings == {"method": "ngram", "num_speculative_tokens": 32}


def test_where_padding_costs_little_asynchronous_scheduling_has_a_length_for_each_batch_size():
    rows = padded((1, 16, 3.0), (4, 16, 2.5), (16, 8, 1.95), (64, 4, 0.9))
    words, settings = parsed(vllm_flags(2.0, 32, rows, concurrency=16))
    assert words[:3] == ["--async-scheduling", "--scheduler-cls", "drafter_service.plugins.vllm.AsyncScheduler"]
    assert settings["num_speculative_tokens"] == 16
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 4, 16], [5, 16, 8], [17, 64, 0]]


def test_drafts_that_are_not_worthwhile_are_not_padded():
    assert vllm_flags(0.9, 4, padded((1, 4, 0.9)), concurrency=1).startswith("--no-async-scheduling")


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [({1: 4}, [[1, 1, 4]]), ({3: 0, 8: 0}, [[1, 8, 0]]), ({1: 8, 2: 4, 9: 8}, [[1, 1, 8], [2, 2, 4], [3, 9, 8]])],
)
def test_ranges_begin_at_one_and_leave_no_gap(lengths, expected):
    assert ranges_of(lengths) == expected
