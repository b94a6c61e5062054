"""With any settings, drafts and other requests do not change tokens, finish reasons or log-probabilities.

The expected outputs are computed by a loop without batches, pages or drafts.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.sampling.noise import gumbel_noise
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.errors import UserError
from tests.engine import naive_sampling as naive
from tests.engine.fake_runner import EOS, VOCAB, fake_engine, logits_after
from tests.engine.trees import RandomPaths, RandomTrees
from tests.strategies import array

PIECES = ["a", "b", "ab", "c", "bcb", "", *"defghk"]
"""Texts of the tokens, in some of which a stop string may end before the last character."""
token = st.integers(0, VOCAB - 1)
half = st.integers(-4, 4).map(lambda n: n / 2)


def decode(tokens):
    return "".join(PIECES[token] for token in tokens.tolist())


@st.composite
def sampling_params(draw):
    max_tokens = draw(st.integers(1, 25))
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=draw(st.sampled_from([0.0, 0.7, 1.0, 1.5])),
        seed=draw(st.integers(0, 1000)),
        top_k=draw(st.sampled_from([0, 0, 1, 4])),
        top_p=draw(st.sampled_from([1.0, 1.0, 0.5, 0.9])),
        min_p=draw(st.sampled_from([0.0, 0.0, 0.1])),
        repetition_penalty=draw(st.sampled_from([1.0, 1.0, 1.3])),
        presence_penalty=draw(st.one_of(st.just(0.0), half)),
        frequency_penalty=draw(st.one_of(st.just(0.0), half)),
        logit_bias=draw(st.dictionaries(token, half, max_size=2)),
        stop=tuple(draw(st.lists(st.text("abcdefghijk", min_size=1, max_size=3), max_size=2))),
        stop_token_ids=tuple(draw(st.lists(token, max_size=1))),
        ignore_eos=draw(st.booleans()),
        min_tokens=draw(st.integers(0, max_tokens)),
        logprobs=draw(st.sampled_from([None, None, 0, 3])),
        prompt_logprobs=draw(st.sampled_from([None, None, 0, 2])),
    )


requests = st.lists(
    st.builds(
        lambda prompt, sampling: Request(array(prompt), sampling),
        st.lists(token, min_size=1, max_size=30),
        sampling_params(),
    ),
    min_size=1,
    max_size=6,
)


def naive_output(request):
    """Return (tokens, finish reason, stop reason, text), computed one token at a time."""
    sampling, prompt = request.sampling, request.prompt.tolist()
    output = []
    while True:
        logits = naive.processed(logits_after(prompt + output), sampling, prompt, output, (EOS,))
        if sampling.temperature == 0:
            chosen = int(np.argmax(logits))
        else:
            # float32, as the engine scores: ties must remain ties.
            scores = (torch.tensor(logits) / sampling.temperature).tolist()
            tokens = naive.kept(scores, sampling.top_k, sampling.top_p, sampling.min_p)
            position = torch.tensor([len(prompt) + len(output)])
            noise = gumbel_noise(torch.tensor([sampling.seed]), position, VOCAB)[0].tolist()
            chosen = max(tokens, key=lambda token: np.float32(scores[token]) + np.float32(noise[token]))
        output.append(chosen)
        pieces = [PIECES[token] for token in output]
        if chosen == EOS and not sampling.ignore_eos:
            return output, "stop", None, "".join(pieces[:-1])
        if chosen in sampling.stop_token_ids:
            return output, "stop", chosen, "".join(pieces[:-1])
        text, found, _ = naive.stopped(pieces, sampling.stop, sampling.min_tokens)
        if found is not None:
            return output, "stop", found, text
        if len(output) == sampling.max_tokens:
            return output, "length", None, text


def as_tuple(request, completion):
    text = decode(completion.content) if completion.text is None else completion.text
    return completion.tokens.tolist(), completion.finish_reason.value, completion.stop_reason, text


def check_logprobs(request, completion):
    """Check the log-probabilities of the output and of the prompt, which are the model's own."""
    text = [*request.prompt.tolist(), *completion.tokens.tolist()]
    first = len(request.prompt)
    for found, count, start, end in (
        (completion.logprobs, request.sampling.logprobs, first, len(text)),
        (completion.prompt_logprobs, request.sampling.prompt_logprobs, 1, first),
    ):
        if count is None:
            assert found is None
            continue
        assert found.top.shape == found.top_ids.shape == (end - start, count)
        for index, place in enumerate(range(start, end)):
            expected = naive.log_softmax(logits_after(text[:place]).tolist())
            assert abs(found.tokens[index] - expected[text[place]]) < 1e-4
            np.testing.assert_allclose(found.top[index], sorted(expected, reverse=True)[:count], atol=1e-4)
            np.testing.assert_allclose([expected[other] for other in found.top_ids[index]], found.top[index], atol=1e-4)


def check_all(submitted, seed, max_sequences=4, shape="path", verified="path"):
    """Run requests with drafts of a shape; `verified`: the shape that the engine verifies."""
    expected = [naive_output(request) for request in submitted]
    answers = [answer[0] for answer in expected]
    drafter = (RandomPaths if shape == "path" else RandomTrees)(submitted, answers, VOCAB, seed)
    engine = fake_engine(drafter, decode, max_sequences=max_sequences, max_step_tokens=40, draft_shape=verified)
    completions = engine.generate(submitted)
    assert [as_tuple(*pair) for pair in zip(submitted, completions, strict=True)] == expected
    for request, completion in zip(submitted, completions, strict=True):
        check_logprobs(request, completion)
    return completions


SHAPES = (("path", "path"), ("tree", "path"), ("tree", "tree"))
"""Shapes of drafts, and shapes that the engine verifies."""


@settings(max_examples=100)
@given(requests, st.integers(0, 1000), st.integers(1, 4), st.sampled_from(SHAPES))
def test_outputs_equal_the_naive_ones(submitted, seed, max_sequences, shapes):
    check_all(submitted, seed, max_sequences, *shapes)


def penalized_requests():
    rng = np.random.default_rng(1)
    sampling = {"temperature": 1.0, "frequency_penalty": 1.5, "min_tokens": 15, "max_tokens": 20}
    return [
        Request(rng.integers(0, VOCAB, 5).astype(np.uint32), SamplingParams(seed=seed, stop_token_ids=(3,), **sampling))
        for seed in range(20)
    ]


def test_drafts_are_accepted_under_any_settings():
    """The test above is only meaningful if drafts are accepted."""
    completions = check_all(penalized_requests(), 0)
    assert sum(completion.accepted for completion in completions) > 100
    trees, trunks = (check_all(penalized_requests(), 0, 4, "tree", verified) for verified in ("tree", "path"))
    assert sum(each.steps for each in trees) < 0.8 * sum(each.steps for each in trunks)


def test_stop_strings_without_a_tokenizer_are_refused():
    engine = fake_engine(NoDrafter(), None)
    with pytest.raises(UserError, match="stop needs"):
        engine.add(Request(array([1]), SamplingParams(stop=("a",))))
