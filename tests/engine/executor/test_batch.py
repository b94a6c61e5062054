from dataclasses import fields

import numpy as np
import pytest

from engine.executor.batch import build_batch
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree


def random_sequence(rng, page_size):
    """Somewhere in its prompt, at the end of it, or behind it, with a path, with a tree or without a draft."""
    prompt = rng.integers(0, 1000, rng.integers(2, 60)).astype(np.uint32)
    asked = SamplingParams(prompt_logprobs=0 if rng.random() < 0.3 else None)
    sequence = Sequence(0, Request(prompt, asked), len(prompt) + 50)
    if asked.prompt_logprobs is None:
        sequence.computed = int(rng.integers(0, len(prompt)))
    sequence.scheduled = int(rng.integers(1, len(prompt) - sequence.computed + 1))
    if sequence.completes_prompt:
        sequence.draft = rng.integers(0, 1000, rng.integers(0, 7)).astype(np.uint32)
        if len(sequence.draft) and rng.random() < 0.5:
            sequence.tree = DraftTree(
                np.array([rng.integers(-1, index) for index in range(len(sequence.draft))], np.int32)
            )
    held = sequence.computed + sequence.scheduled + len(sequence.draft)
    sequence.pages = rng.permutation(500)[: -(-held // page_size) + rng.integers(0, 3)].tolist()
    return sequence


def depths(sequence):
    """How far each draft token lies behind the last committed one."""
    found = []
    for index in range(len(sequence.draft)):
        parent = index - 1 if sequence.tree is None else int(sequence.tree.parents[index])
        found.append(1 + (found[parent] if parent >= 0 else 0))
    return found


def naive_batch(sequences, page_size):
    """Token by token."""
    tokens, positions, slots, rows, offsets, scored, scored_counts = [], [], [], [], [0], [], [0]
    for sequence in sequences:
        start = len(tokens)
        new = sequence.tokens[sequence.computed :][: sequence.scheduled].tolist() + sequence.draft.tolist()
        for place, token in enumerate(new, start=sequence.computed):
            tokens.append(token)
            slots.append(sequence.pages[place // page_size] * page_size + place % page_size)
        end = sequence.computed + sequence.scheduled
        positions += [*range(sequence.computed, end), *(end - 1 + depth for depth in depths(sequence))]
        if sequence.completes_prompt:
            rows += range(len(tokens) - len(sequence.draft) - 1, len(tokens))
        offsets.append(len(rows))
        scored += [start + position - sequence.computed for position in sequence.scored]
        scored_counts.append(len(scored))
    return {
        "tokens": tokens,
        "positions": positions,
        "slots": slots,
        "logit_rows": rows + scored,
        "logit_offsets": offsets,
        "scored_offsets": [len(rows) + count for count in scored_counts],
    }


@pytest.mark.parametrize("seed", range(60))
def test_a_batch_is_what_a_loop_over_tokens_makes(seed):
    rng = np.random.default_rng(seed)
    page_size = int(rng.integers(1, 20))
    sequences = [random_sequence(rng, page_size) for _ in range(rng.integers(1, 8))]
    batch = build_batch(sequences, page_size)
    expected = naive_batch(sequences, page_size)
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert all(getattr(batch, name).dtype == np.int64 for name in expected)
    assert {field.name for field in fields(batch)} == {*expected, "spans"}
    assert [span.computed + span.length for span in batch.spans] == [
        s.computed + s.scheduled + len(s.draft) for s in sequences
    ]
    assert [span.tree for span in batch.spans] == [sequence.tree for sequence in sequences]
    assert [span.pages for span in batch.spans] == [sequence.pages for sequence in sequences]
