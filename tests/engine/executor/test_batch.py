import numpy as np
import pytest

from engine.executor.batch import scored
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence
from engine.speculation.draft_tree import DraftTree
from tests.engine.steps import Entry, batch_of, spans_of
from tests.engine.tables import give_pages


def random_entry(rng, page_size):
    """An entry within its prompt or at its end, with a path, a tree or no draft, and extra rows or none."""
    prompt = rng.integers(0, 1000, rng.integers(2, 60)).astype(np.uint32)
    sampling = SamplingParams(prompt_logprobs=0 if rng.random() < 0.3 else None)
    sequence = Sequence(0, Request(prompt, sampling), len(prompt) + 50)
    if sampling.prompt_logprobs is None:
        sequence.computed = int(rng.integers(0, len(prompt)))
    scheduled = int(rng.integers(1, len(prompt) - sequence.computed + 1))
    entry = Entry(sequence, sequence.computed, scheduled)
    if entry.produces:
        entry.draft = rng.integers(0, 1000, rng.integers(0, 7)).astype(np.uint32)
        if len(entry.draft) and rng.random() < 0.5:
            entry.tree = random_shape(rng, len(entry.draft))
        if rng.random() < 0.4:
            entry.extra = rng.integers(0, 1000, rng.integers(1, 7)).astype(np.uint32)
            entry.extra_tree = random_shape(rng, len(entry.extra))
    held = sequence.computed + scheduled + len(entry.draft) + len(entry.extra)
    give_pages(sequence, rng.permutation(500)[: -(-held // page_size) + rng.integers(0, 3)])
    return entry


def random_shape(rng, size):
    return DraftTree(np.array([rng.integers(-1, index) for index in range(size)], np.int32))


def ancestors(entry):
    """For each draft token and extra row, the list of those it attends to, itself last."""
    found = []
    for index in range(len(entry.draft)):
        parent = index - 1 if entry.tree is None else int(entry.tree.parents[index])
        found.append([*(found[parent] if parent >= 0 else []), index])
    for index in range(len(entry.extra)):
        parent = int(entry.extra_tree.parents[index])
        found.append([*(found[len(entry.draft) + parent] if parent >= 0 else []), len(entry.draft) + index])
    return found


def naive_batch(entries, page_size):
    """Build the arrays token by token."""
    tokens, positions, slots, rows, offsets, scored_rows, scored_counts = [], [], [], [], [0], [], [0]
    extra = []
    for entry in entries:
        start, sequence = len(tokens), entry.sequence
        new = sequence.tokens[entry.computed :][: entry.scheduled].tolist() + entry.draft.tolist()
        verified = start + len(new)
        new += entry.extra.tolist()
        for place, token in enumerate(new, start=entry.computed):
            tokens.append(token)
            slots.append(sequence.pages[place // page_size] * page_size + place % page_size)
        end = entry.computed + entry.scheduled
        positions += [*range(entry.computed, end), *(end - 1 + len(path) for path in ancestors(entry))]
        if entry.produces:
            rows += range(verified - len(entry.draft) - 1, verified)
            offsets.append(len(rows))
        positions_scored = scored(sequence, entry.computed, entry.scheduled)
        scored_rows += [start + position - entry.computed for position in positions_scored]
        scored_counts.append(len(scored_rows))
        extra += range(verified, len(tokens))
    return {
        "tokens": tokens,
        "positions": positions,
        "slots": slots,
        "logit_rows": rows + scored_rows + extra,
        "logit_offsets": offsets,
        "scored_offsets": [len(rows) + count for count in scored_counts],
    }


@pytest.mark.parametrize("seed", range(60))
def test_build_batch_equals_a_loop_over_tokens(seed):
    rng = np.random.default_rng(seed)
    page_size = int(rng.integers(1, 20))
    entries = [random_entry(rng, page_size) for _ in range(rng.integers(1, 8))]
    entries.sort(key=lambda entry: not entry.produces)
    batch = batch_of(entries, page_size)
    expected = naive_batch(entries, page_size)
    assert {name: getattr(batch, name).tolist() for name in expected} == expected
    assert all(getattr(batch, name).dtype == np.int64 for name in expected)
    assert batch.adapters == [None] * len(entries)
    for span, entry in zip(spans_of(batch), entries, strict=True):
        assert span.computed == entry.computed
        assert span.length == entry.scheduled + len(entry.draft) + len(entry.extra)
        needed = -(-(span.computed + span.length) // page_size)
        assert span.pages[:needed] == entry.sequence.pages[:needed]
        is_path = not len(entry.extra) and (entry.tree is None or ancestors(entry)[-1] == [*range(len(entry.draft))])
        nodes = [] if is_path else ancestors(entry)
        assert [np.flatnonzero(row).tolist() for row in DraftTree(span.parents).sees] == nodes
