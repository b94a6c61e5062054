"""The host and the device keep the same drafts of a step: those whose predicted outcome occurred."""

import numpy as np
import torch

from engine.executor.device_state import DeviceState
from engine.executor.fixed_step import INPUT_COLUMNS, following_drafts
from engine.scheduling.plan import SequencePlan, StepPlan
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence

VOCAB, LENGTH, WIDTH = 3, 30, 4


def test_host_and_device_keep_the_same_drafts():
    rng = np.random.default_rng(0)
    kept, dropped = 0, 0
    for _ in range(60):
        sequences = [
            Sequence(index, Request(rng.integers(0, VOCAB, 8).astype(np.uint32), SamplingParams()), LENGTH)
            for index in range(5)
        ]
        plan = StepPlan([SequencePlan(each, 7, 1, True) for each in sequences])
        slots = rng.permutation(7)[:5]
        state = DeviceState.empty(7, LENGTH, 4, 0, torch.device("cpu"))
        table = np.zeros((5, INPUT_COLUMNS + WIDTH), np.int32)
        expected = []
        for slot, row, entry in zip(slots, table, plan.producing, strict=True):
            state.assign(int(slot), entry.sequence)
            size = int(rng.integers(0, WIDTH + 1))
            entry.draft = rng.integers(0, VOCAB, size).astype(np.uint32)
            entry.sources = np.arange(size, dtype=np.uint8)
            if rng.random() < 0.8:
                entry.predicted_end = int(rng.integers(7, 9)), int(rng.integers(0, VOCAB))
            length, last_token = entry.predicted_end or (8, entry.sequence.tokens[-1])
            row[: INPUT_COLUMNS + size] = slot, 1 + size, length, last_token, *entry.draft
            occurred = (length, last_token) == (8, entry.sequence.tokens[-1])
            expected.append(entry.draft.tolist() if occurred else [])
            kept, dropped = kept + (occurred and size > 0), dropped + (not occurred)
        plan.drop_mispredicted()
        assert [entry.draft.tolist() for entry in plan.producing] == expected
        assert all(entry.sources.tolist() == list(range(len(entry.draft))) for entry in plan.producing)
        drafts = following_drafts(state, torch.from_numpy(slots), torch.from_numpy(table))
        on_device = zip(drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True)
        assert [tokens[:size] for tokens, size in on_device] == expected
    assert min(kept, dropped) > 50
