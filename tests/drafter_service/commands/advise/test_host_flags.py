"""The drafts that `advise` chooses for vLLM, and the flags that it prints."""

import json
import shlex

import pytest

from drafter_service.commands.advise.advice import best_padded, ranges_of, vllm_choice, vllm_flags
from drafter_service.commands.advise.trials import Outcome, Trial


def path(max_draft, concurrency, speedup, *, is_padded=False):
    return Outcome(Trial("ssd", "path", max_draft, concurrency, 1000, is_padded), None, speedup)


def padded(*rows):
    return [path(length, count, speedup, is_padded=True) for count, length, speedup in rows]


def flags_of(paths, concurrency):
    """Return the words of the flags and the settings in them."""
    words = shlex.split(vllm_flags(vllm_choice(paths, concurrency), best_padded(paths)))
    return words, json.loads(words[words.index("--speculative-config") + 1])


def test_drafts_of_any_length_need_synchronous_scheduling():
    paths = [path(8, 16, 1.9), path(16, 16, 2.0), *padded((1, 16, 1.9), (16, 8, 1.5))]
    words, settings = flags_of(paths, 16)
    assert words[:3] == ["--no-async-scheduling", "--scheduler-cls", "drafter_service.plugins.vllm.Scheduler"]
    assert settings == {"method": "ngram", "num_speculative_tokens": 16}


def test_a_shorter_draft_is_preferred_where_it_is_nearly_as_fast():
    assert vllm_choice([path(8, 1, 1.985), path(16, 1, 2.0), *padded((1, 8, 1.5))], 1).trial.max_draft == 8


def test_where_padding_costs_little_asynchronous_scheduling_has_a_length_for_each_batch_size():
    rows = padded((1, 16, 3.0), (1, 8, 2.0), (4, 16, 2.5), (16, 8, 1.95), (64, 4, 0.9))
    words, settings = flags_of([path(16, 16, 2.0), *rows], 16)
    assert words[:3] == ["--async-scheduling", "--scheduler-cls", "drafter_service.plugins.vllm.AsyncScheduler"]
    assert settings["num_speculative_tokens"] == 16
    assert settings["num_speculative_tokens_per_batch_size"] == [[1, 4, 16], [5, 16, 8], [17, 64, 0]]


def test_drafts_that_are_not_worthwhile_are_not_padded():
    assert not vllm_choice([path(4, 1, 0.9), *padded((1, 4, 0.9))], 1).trial.is_padded


@pytest.mark.parametrize(
    ("lengths", "expected"),
    [({1: 4}, [[1, 1, 4]]), ({3: 0, 8: 0}, [[1, 8, 0]]), ({1: 8, 2: 4, 9: 8}, [[1, 1, 8], [2, 2, 4], [3, 9, 8]])],
)
def test_ranges_begin_at_one_and_leave_no_gap(lengths, expected):
    assert ranges_of(lengths) == expected
