"""Ranges of a request's settings, and the content of completions."""

import re

import numpy as np
import pytest

from engine.scheduling.request import Completion, FinishReason, Request, SamplingParams, parse_drafters
from ssd.errors import UserError
from tests.engine.fake_runner import MODEL, VOCAB
from tests.strategies import array

NAN, INFINITY = float("nan"), float("inf")
OUT_OF_RANGE = {
    "max_tokens": [0, -1],
    "temperature": [-0.1, NAN, INFINITY],
    "seed": [1 << 63, -(1 << 63) - 1],
    "top_k": [-2],
    "top_p": [0, -0.1, 1.1, NAN],
    "min_p": [-0.1, 1.1, NAN],
    "repetition_penalty": [0, -1, 1e-38, 101, NAN, INFINITY],
    "presence_penalty": [-2.1, 2.1, NAN],
    "frequency_penalty": [-2.1, 2.1, NAN],
    "logit_bias": [{3: 100.5}, {3: -101}, {3: NAN}],
    "stop": ["text", ("a", "")],
    "min_tokens": [-1, 129],
    "logprobs": [-1, 21],
    "prompt_logprobs": [-1, 21],
}
AT_THE_EDGE = {
    "max_tokens": [1],
    "temperature": [0, 100.0],
    "seed": [(1 << 63) - 1, -(1 << 63)],
    "top_k": [-1, 0, 1, 10**9],
    "top_p": [1e-9, 1],
    "min_p": [0, 1],
    "repetition_penalty": [0.01, 100],
    "presence_penalty": [-2, 2],
    "frequency_penalty": [-2, 2],
    "logit_bias": [{0: -100, VOCAB - 1: 100}],
    "stop": [("a",) * 10],
    "stop_token_ids": [(0, VOCAB - 1)],
    "min_tokens": [0, 128],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
}


def cases(settings):
    return [pytest.param({name: value}, id=f"{name}={value}") for name, values in settings.items() for value in values]


@pytest.mark.parametrize("setting", cases(OUT_OF_RANGE))
def test_settings_out_of_range_are_refused(setting):
    with pytest.raises(UserError, match=next(iter(setting))) as refusal:
        SamplingParams(**setting)
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize("setting", cases(AT_THE_EDGE))
def test_settings_at_the_limits_are_accepted(setting):
    Request(array([1]), SamplingParams(**setting)).check(MODEL)


NOT_OF_THE_MODEL = [
    *((Request(array([1]), SamplingParams(logit_bias={token: 1.0})), "logit_bias") for token in (VOCAB, -1)),
    *((Request(array([1]), SamplingParams(stop_token_ids=(token,))), "stop_token_ids") for token in (VOCAB, -1)),
    (Request(array([1, VOCAB, 2])), f"the prompt .* {VOCAB}; the vocabulary ends at {VOCAB - 1}"),
    (Request(array([1]), recorded=array([2, VOCAB])), f"the recorded output .* {VOCAB};"),
    # Stop tokens that forbid every token.
    (Request(array([1]), SamplingParams(min_tokens=1, stop_token_ids=tuple(range(1, VOCAB)))), "stop_token_ids"),
]


@pytest.mark.parametrize(("request_", "word"), NOT_OF_THE_MODEL)
def test_requests_that_the_model_cannot_run_are_refused(request_, word):
    with pytest.raises(UserError, match=word):
        request_.check(MODEL)


def test_recorded_outputs_may_be_empty_and_have_every_token():
    for recorded in (array([]), array([0, VOCAB - 1])):
        Request(array([1]), recorded=recorded).check(MODEL)


CHOICES = [
    ((), "mtp", "drafter must be none; 'mtp' is not loaded"),
    (("ssd",), "mtp", "drafter must be ssd or none; 'mtp' is not loaded"),
    (("ssd",), "ssd+none", "drafter must be ssd or none; 'none' is not loaded"),
    (("ssd",), "", "drafter must be ssd or none; '' is not loaded"),
    (("ssd", "mtp"), "rest+eagle+ssd", "several of these joined by + or none; 'eagle', 'rest' is not loaded"),
]


@pytest.mark.parametrize(("loaded", "text", "message"), CHOICES)
def test_drafters_that_are_not_loaded_are_refused(loaded, text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        Request(array([1]), drafters=parse_drafters(text)).check_drafting(loaded, 4)


def test_requests_choose_among_the_loaded_drafters():
    chosen = {
        text: Request(array([1]), drafters=parse_drafters(text)) for text in ("ssd+mtp", "mtp+ssd", "mtp", "none")
    }
    for request in (*chosen.values(), Request(array([1]))):
        request.check_drafting(("ssd", "mtp"), 4)
    assert chosen["ssd+mtp"].drafters == chosen["mtp+ssd"].drafters == {"ssd", "mtp"}
    assert [chosen[text].is_drafted for text in ("mtp", "none")] == [True, False]
    assert Request(array([1])).is_drafted


def test_the_longest_draft_is_at_most_the_engines():
    for most in (None, 0, 1, 4):
        request = Request(array([1]), max_draft=most)
        request.check_drafting((), 4)
        assert request.is_drafted is (most != 0)
    for most in (-1, 5):
        with pytest.raises(UserError, match=f"max_draft must be 0 to 4, not {most}"):
            Request(array([1]), max_draft=most).check_drafting((), 4)


def test_content_excludes_the_end_token():
    def content(reason, stop_reason):
        return Completion(np.arange(3), reason, 1, 0, 0, stop_reason).content.tolist()

    assert content(FinishReason.STOP, None) == [0, 1]
    assert content(FinishReason.STOP, 2) == [0, 1]
    assert content(FinishReason.STOP, "text") == [0, 1, 2]
    assert content(FinishReason.LENGTH, None) == [0, 1, 2]
