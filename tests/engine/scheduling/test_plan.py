"""The host selects the same drafts for a step as the device."""

import numpy as np
import torch

from engine.drafters.outcomes import OutcomeTable
from engine.executor.device_state import DeviceState
from engine.executor.kernels import select
from engine.scheduling.plan import SequencePlan, StepPlan
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import Sequence

VOCAB, LENGTH, OUTCOMES, WIDTH = 3, 30, 3, 4


def random_table(rng, sequences):
    table = OutcomeTable.empty(sequences, OUTCOMES, WIDTH)
    table.accepted[:] = rng.integers(-1, 3, (sequences, OUTCOMES))
    for array in (table.bonus, table.tokens):
        array[:] = rng.integers(0, VOCAB, array.shape)
    table.lengths[:] = rng.integers(0, WIDTH + 1, table.lengths.shape)
    table.source[:] = table.tokens % 2
    return table


def test_host_and_device_select_the_same_drafts():
    rng = np.random.default_rng(0)
    selected = 0
    for _ in range(60):
        sequences = [
            Sequence(index, Request(rng.integers(0, VOCAB, 8).astype(np.uint32), SamplingParams()), LENGTH)
            for index in range(5)
        ]
        table = random_table(rng, len(sequences))
        known = np.array([8 - 1 - rng.integers(0, 3) for _ in sequences])
        plan = StepPlan([SequencePlan(each, 7, 1, True) for each in sequences], outcomes=table, known_lengths=known)
        plan.select_drafts()
        state = DeviceState.empty(len(sequences), LENGTH, 4, 0, torch.device("cpu"))
        for slot, sequence in enumerate(sequences):
            state.assign(slot, sequence)
        lengths = np.where(table.accepted >= 0, known[:, None] + table.accepted + 1, 0)
        columns = (lengths, table.bonus, table.lengths, table.tokens)
        on_device = select.OutcomeTensors(*(torch.from_numpy(column.astype(np.int32)) for column in columns))
        drafts = select.select_drafts(state, torch.arange(len(sequences)), on_device, WIDTH)
        for entry, tokens, size in zip(plan.producing, drafts.tokens.tolist(), drafts.lengths.tolist(), strict=True):
            assert entry.draft.tolist() == tokens[:size]
            assert entry.sources.tolist() == [token % 2 for token in tokens[:size]]
            selected += size
    assert selected > 100
