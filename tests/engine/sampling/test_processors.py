"""Compare bias, penalties and forbidden end tokens with loops, at every row of a draft."""

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.sampling.processors import NOT_NEEDED, Rows, process_logits
from engine.sampling.stopping import Stopping
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.request import Request, SamplingParams
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
