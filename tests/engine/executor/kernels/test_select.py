"""Compare the selected drafts with a search in plain Python."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from engine.executor.kernels import select
from engine.executor.kernels.select import OutcomeTensors, select_drafts
from tests.engine.executor.kernels.implementations import INTERPRETED, REFERENCE, planted, require_interpreter


def random_case(seed):
    """Random states and outcome tables of a few sequences; tables often have the true outcome."""
    rng = np.random.default_rng(seed)
    batch, rows, size = (int(rng.integers(1, most)) for most in (5, 10, 6))
    slots = rng.permutation(batch + 2)[:batch]
    lengths, last_tokens = rng.integers(1, 4, batch + 2), rng.integers(0, 3, batch + 2)
    table = {
        "lengths": rng.integers(0, 4, (batch, rows)),
        "last_tokens": rng.integers(0, 3, (batch, rows)),
        "sizes": rng.integers(0, size + 1, (batch, rows)),
        "tokens": rng.integers(1, 9, (batch, rows, size)),
    }
    return slots, lengths, last_tokens, table, int(rng.integers(1, size + 3))


def expected_draft(length, last_token, table, index, width):
    for row in range(table["lengths"].shape[1]):
        if (table["lengths"][index, row], table["last_tokens"][index, row]) == (length, last_token):
            return table["tokens"][index, row, : min(width, table["sizes"][index, row])].tolist()
    return []


def views_of_one(table, device):
    """The table as views of one tensor, as in a step."""
    batch, rows = table["lengths"].shape
    parts = [np.reshape(table[name], (batch, rows, -1)) for name in OutcomeTensors._fields]
    joined = torch.from_numpy(np.concatenate(parts, axis=2).astype(np.int32)).to(device)
    return OutcomeTensors(joined[:, :, 0], joined[:, :, 1], joined[:, :, 2], joined[:, :, 3:])


def agrees(operation, implementation, seed):
    slots, lengths, last_tokens, table, width = random_case(seed)
    device = implementation.device
    columns = {"lengths": lengths, "last_tokens": last_tokens}
    state = SimpleNamespace(**{k: torch.from_numpy(v.astype(np.int32)).to(device) for k, v in columns.items()})
    select_one = implementation.of(operation)
    drafts = select_one(state, torch.from_numpy(slots).to(device), views_of_one(table, device), width)
    assert drafts.tokens.dtype == drafts.lengths.dtype == torch.int32
    assert drafts.tokens.shape == (len(slots), width)
    expected = [
        expected_draft(lengths[slot], last_tokens[slot], table, index, width) for index, slot in enumerate(slots)
    ]
    padded = [draft + [0] * (width - len(draft)) for draft in expected]
    return drafts.lengths.tolist() == list(map(len, expected)) and drafts.tokens.tolist() == padded


def test_the_draft_of_the_outcome_is_selected(implementation):
    assert all(agrees(select_drafts, implementation, seed) for seed in range(2 * implementation.cases))


REFERENCE_FAULTS = {
    "any length": ("(table.lengths == state.lengths[request_slots][:, None])", "(table.lengths > 0)"),
    "any last token": ("table.last_tokens == state.last_tokens[request_slots][:, None]", "table.last_tokens >= 0"),
    "state of other slots": ("state.lengths[request_slots]", "state.lengths[: len(request_slots)]"),
    "a draft without its key": ("torch.where(is_outcome.any(dim=1), ", "torch.where(is_outcome.any(dim=1) | True, "),
    "not cut to the width": (".clamp(max=width)", ""),
}
KERNEL_FAULTS = {
    "any length": ("(length == tl.load(state_lengths + slot))", "(length > 0)"),
    "any last token": ("(last_token == tl.load(state_last_tokens + slot))", "(last_token >= 0)"),
    "the last of equal keys": ("tl.min(tl.where(is_outcome, row, ROWS)", "tl.max(tl.where(is_outcome, row, -1)"),
    "not cut to the width": ("size = tl.minimum(size, width)", "size = size + 0"),
    "tokens of the first row": ("found * tokens_step + column", "column"),
}


@pytest.mark.parametrize("fault", REFERENCE_FAULTS)
def test_faults_in_the_reference_are_caught(fault, tmp_path):
    module = planted(select, *REFERENCE_FAULTS[fault], tmp_path)
    assert not all(agrees(module.select_drafts, REFERENCE, seed) for seed in range(300))


@pytest.mark.parametrize("fault", KERNEL_FAULTS)
def test_faults_in_the_kernel_are_caught(fault, tmp_path):
    require_interpreter()
    module = planted(select, *KERNEL_FAULTS[fault], tmp_path)
    assert not all(agrees(module.select_drafts, INTERPRETED, seed) for seed in range(60))
