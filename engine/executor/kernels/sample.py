"""The target's tokens of a step, by the settings of the seats; `engine.sampling.sampler` has those of the host."""

from __future__ import annotations

import torch
from torch import Tensor

from engine.executor.device_state import NOT_RECORDED, DeviceState
from engine.executor.kernels.drafted import StepInputs
from engine.executor.kernels.draw import draw_tokens
from engine.sampling.noise import greedy_tokens
from engine.sampling.truncation import Limits


def sampled_tokens(
    state: DeviceState, inputs: StepInputs, logits: Tensor, *, draws: bool, most: int | None = None
) -> Tensor:
    """The token behind each of the inputs' rows, int64 [N]. logits: float32 [N, V].

    What decides how much work there is the host must say: whether any sequence `draws`, and `most`, as in `Limits`, if
    any truncates.
    """
    if not draws:
        return greedy_tokens(logits)
    seats = inputs.seats
    limits = None if most is None else Limits(state.top_k[seats], state.top_p[seats], state.min_p[seats], most)
    return draw_tokens(logits, state.temperatures[seats], state.seeds[seats], inputs.positions + 1, limits)


def replayed(state: DeviceState, inputs: StepInputs, tokens: Tensor) -> Tensor:
    """The same tokens, int64 [N], but for those that were recorded."""
    recorded = state.history[:, 1:][inputs.seats, inputs.positions]
    return torch.where(recorded == NOT_RECORDED, tokens, recorded)
