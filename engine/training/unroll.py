"""Run a draft head over a window, then along chains of its own output, as at inference.

Training-time test of EAGLE-3 (Li et al., 2025). Step 0 reads the target's states of the whole window. A chain begins at
one of its rows: step j reads the state that step j - 1 of the chain returned and the next token of the text, and
predicts what the drafter would draft at depth j + 1 after accepted drafts. It attends to the rows of step 0 up to its
start, whose keys the drafter has for committed tokens, and to its own steps from 1 on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from engine.models.heads.head import DraftHead, HeadOutput
from engine.training.attention import ChainAttention, WindowAttention


def run_window(head: DraftHead, tokens: Tensor, states: Tensor) -> tuple[HeadOutput, WindowAttention]:
    """Run step 0 and return its output, [B, M, hidden_size] each, and what chains attend to.

    tokens: int64 [B, M + 1]. states: [B, M, hidden_size], from `DraftHead.target_states`, of all but the last token.
    Row r is the pair (state of r, token r + 1). The first token has no pair.
    """
    windows, rows = states.shape[:2]
    attention = WindowAttention(windows, rows)
    positions = torch.arange(1, rows + 1).repeat(windows)
    output = head(tokens[:, 1:].flatten(), states.flatten(0, 1), positions, attention.attend)
    return _as_windows(output, windows), attention


def run_chains(
    head: DraftHead, tokens: Tensor, first: HeadOutput, window: WindowAttention, starts: Tensor, steps: int
) -> list[HeadOutput]:
    """Run steps 1 to `steps` of chains and return their outputs, [B, C, hidden_size] each.

    first: output of step 0. starts: int64 [B, C], rows of the window, at most M - 1 - steps.
    """
    windows = len(starts)
    attention = ChainAttention(window, starts)
    states = first.state.gather(1, starts[..., None].expand(-1, -1, first.state.shape[-1]))
    outputs = []
    for step in range(1, steps + 1):
        positions = starts + step + 1
        text = tokens.gather(1, positions).flatten()
        output = head(text, states.flatten(0, 1), positions.flatten(), attention.attend)
        outputs.append(_as_windows(output, windows))
        states = outputs[-1].state
    return outputs


def _as_windows(output: HeadOutput, windows: int) -> HeadOutput:
    return HeadOutput(*(x.view(windows, -1, x.shape[-1]) for x in output))
