"""Processed logits, ends of outputs and log-probabilities equal those computed token by token."""

import numpy as np
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from engine.sampling.logprobs import compute_logprobs, join_logprobs
from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.sampling.stopping import Cut, Stopping
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.scheduling.sequence import Sequence
from tests.engine import naive_sampling as naive
from tests.engine.steps import Entry
from tests.strategies import array

VOCAB = 9
EOS = (0,)
token = st.integers(0, VOCAB - 1)
half = st.integers(-4, 4).map(lambda n: n / 2)


@st.composite
def plans(draw):
    """The plan of a sequence whose output was committed in steps, with a draft."""
    sampling = SamplingParams(
        max_tokens=30,
        repetition_penalty=draw(st.sampled_from([1.0, 1.5, 0.5])),
        presence_penalty=draw(half),
        frequency_penalty=draw(half),
        logit_bias=draw(st.dictionaries(token, half, max_size=3)),
        min_tokens=draw(st.integers(0, 8)),
        stop_token_ids=tuple(draw(st.lists(token, max_size=2))),
    )
    request = Request(array(draw(st.lists(token, min_size=1, max_size=6))), sampling)
    sequence = Sequence(0, request, 60, Stopping(request, EOS))
    for _ in range(draw(st.integers(0, 3))):
        rejected = array(draw(st.lists(token, max_size=4)))
        if sequence.token_counts is not None:
            sequence.token_counts.along(rejected)
        sequence.commit(array(draw(st.lists(token, min_size=1, max_size=4))))
    return Entry(sequence, 0, 1, array(draw(st.lists(token, max_size=5))))


@given(st.lists(plans(), min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_rows_are_processed_as_if_the_draft_were_committed(entries, seed, only_last):
    """Check all rows of the drafts, or only those after their last tokens."""
    counts = [1 if only_last else 1 + len(entry.draft) for entry in entries]
    starts = np.cumsum([0, *counts])
    logits = torch.from_numpy(np.random.default_rng(seed).normal(0, 2, (sum(counts), VOCAB)).astype(np.float32))
    rows = []
    for entry, start, count in zip(entries, starts, counts, strict=False):
        own = np.arange(start, start + count)
        skipped = np.full(1 + len(entry.draft) - count, NOT_NEEDED)
        rows.append(Rows(entry.sequence, entry.draft, None, np.concatenate((skipped, own))))
    before = logits.clone()
    after = process_logits(logits, rows)
    assert torch.equal(logits, before), "the model's own logits are needed for log-probabilities"
    for own in rows:
        sequence = own.sequence
        prompt, output = sequence.request.prompt.tolist(), sequence.output.tolist()
        for depth, row in enumerate(own.rows.tolist()):
            if row == NOT_NEEDED:
                continue
            text = output + own.draft[:depth].tolist()
            expected = naive.processed(before[row].tolist(), sequence.request.sampling, prompt, text, EOS)
            np.testing.assert_allclose(after[row].numpy(), expected, rtol=1e-5, atol=1e-6)


def test_logits_are_returned_unchanged_if_no_request_changes_them():
    request = Request(array([1, 2]), SamplingParams(temperature=1.0, top_p=0.5))
    logits = torch.zeros(1, VOCAB)
    assert process_logits(logits, [Rows(Sequence(0, request, 10), array([]), None, np.array([0]))]) is logits


def test_token_counts_ignore_rejected_drafts():
    """The arrays have room only for the sequence's tokens."""
    counts = TokenCounts(array([1, 2]), 4)
    for start in range(0, 1000, 5):
        counts.along(array(range(start, start + 5)))
    counts.add(array([7, 7]))
    seen = counts.along(array([7, 1]))
    assert seen.tokens.tolist() == [1, 2, 7]
    assert seen.counts.tolist() == [[0, 0, 2], [0, 0, 3], [1, 0, 3]]
    assert seen.in_prompt.tolist() == [True, True, False]


PIECES = ["a", "b", "ab", "ba", "aab", "", "c", "bcb"]
stops = st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3)


def decode(tokens):
    return "".join(PIECES[token] for token in tokens.tolist())


def stopping_of(eos=(), prompt=(1, 2), **settings):
    return Stopping(Request(array(prompt), SamplingParams(**settings)), eos, decode)


@given(st.lists(st.integers(0, 7), max_size=20), stops, st.integers(0, 4), st.data())
@example([4, 2], ["abc", "b"], 0, None)
def test_stop_strings_equal_a_loop_over_characters(tokens, stop, min_tokens, data):
    """Tokens are appended in steps of any size, as accepted drafts are."""
    text, found, used = naive.stopped([PIECES[token] for token in tokens], stop, min_tokens)
    stopping = stopping_of(stop=tuple(stop), min_tokens=min_tokens)
    left, taken, cut = array(tokens), 0, Cut(0)
    while len(left) and cut.reason is None:
        size = data.draw(st.integers(1, len(left))) if data else len(left)
        cut = stopping.cut(left[:size], 1000)
        taken += cut.length
        left = left[size:]
    assert (stopping.text(), cut.stop_reason, taken) == (text, found, used)
    assert (cut.reason is FinishReason.STOP) == (found is not None)


def test_end_tokens_stop_tokens_and_length():
    tokens = array([3, 5, 6, 7])
    assert stopping_of(eos=(5,)).cut(tokens, 9) == Cut(2, FinishReason.STOP)
    assert stopping_of(eos=(5,), ignore_eos=True).cut(tokens, 9) == Cut(4)
    assert stopping_of(eos=(6,), stop_token_ids=(5,)).cut(tokens, 9) == Cut(2, FinishReason.STOP, 5)
    assert stopping_of(eos=(5,), stop_token_ids=(5,), ignore_eos=True).cut(tokens, 9) == Cut(2, FinishReason.STOP, 5)
    assert stopping_of().cut(tokens, 4) == Cut(4, FinishReason.LENGTH)
    assert stopping_of(stop_token_ids=(7,)).cut(tokens, 4) == Cut(4, FinishReason.STOP, 7)


def test_stop_strings_that_begin_in_the_prompt_are_ignored():
    stopping = stopping_of(prompt=(0, 1), stop=("ab", "bc"))
    assert stopping.cut(array([6]), 9) == Cut(1)
    assert stopping.text() == "c"


def test_the_text_excludes_the_end_token():
    stopping = stopping_of(eos=(6,), stop=("zz",))
    assert stopping.cut(array([0, 6]), 9).reason is FinishReason.STOP
    assert stopping.text() == "a"


def test_end_ids_include_end_tokens_and_stop_tokens():
    stopping = stopping_of(eos=(6, 1), stop_token_ids=(3,))
    assert np.array_equal(stopping.end_ids, [1, 3, 6])


@given(st.integers(1, 6), st.integers(2, 30), st.integers(0, 40), st.integers(0, 1000))
def test_logprobs_equal_the_log_softmax(rows, size, count, seed):
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 3, (rows, size)).astype(np.float32)
    tokens = rng.integers(0, size, rows).astype(np.uint32)
    found = compute_logprobs(torch.from_numpy(logits), tokens, count)
    for row, token in enumerate(tokens.tolist()):
        expected = naive.log_softmax(logits[row].tolist())
        ranking = sorted(range(size), key=lambda other: -expected[other])
        assert abs(found.tokens[row] - expected[token]) < 1e-4
        assert found.top_ids[row].tolist() == ranking[:count]
        np.testing.assert_allclose(found.top[row], [expected[other] for other in ranking[:count]], atol=1e-4)


def test_joined_parts_equal_the_whole():
    logits, tokens = torch.randn(5, 9, generator=torch.Generator().manual_seed(0)), np.arange(5, dtype=np.uint32)
    whole = compute_logprobs(logits, tokens, 3)
    again = join_logprobs([whole.part(0, 2, 3), whole.part(2, 2), whole.part(2, 5, 3)], 3)
    for name in ("tokens", "top_ids", "top"):
        assert np.array_equal(getattr(again, name), getattr(whole, name))
    assert join_logprobs([], 2).top.shape == (0, 2)
