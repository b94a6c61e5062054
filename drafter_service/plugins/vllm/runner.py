"""vLLM's V2 model runner with the drafts of the scheduler.

The scheduler (`scheduler.py`) puts drafts into the `SchedulerOutput` of each step, which all workers get. The V2 runner
reads only their lengths there, and their ids in a tensor on the device, where vLLM's own speculators write them.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np


@functools.cache
def runner_class() -> type:
    """Return vLLM's V2 model runner with the drafts of the scheduler."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    class DraftingModelRunner(GPUModelRunner):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config, device)
            self.speculator = null_speculator_class()(self.num_speculative_steps, device)

        def update_requests(self, scheduler_output: Any) -> None:
            """Update the running requests of a step, and copy its drafts to the device."""
            super().update_requests(scheduler_output)
            if drafts := scheduler_output.scheduled_spec_decode_tokens:
                states = self.req_states
                rows, tokens = draft_rows(drafts, states.req_id_to_index, states.num_speculative_steps)
                states.draft_tokens[to_device(rows, self.device)] = to_device(tokens, self.device)

    return DraftingModelRunner


@functools.cache
def null_speculator_class() -> type:
    """Return a speculator whose drafts are never verified. The runner verifies drafts only if it has a speculator."""
    import torch
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class NullSpeculator(BaseSpeculator):  # type: ignore[misc]
        supports_mm_inputs = False
        draft_logits = None

        def __init__(self, max_draft: int, device: Any) -> None:
            self.max_draft, self.device = max_draft, device

        def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
            """Do nothing."""

        def capture(self) -> None:
            """Do nothing."""

        def propose(self, input_batch: Any, *_: Any, **__: Any) -> Any:
            """Return zeros, int64 [requests, K]."""
            return torch.zeros(input_batch.num_reqs, self.max_draft, dtype=torch.int64, device=self.device)

    return NullSpeculator


def draft_rows(
    drafts: Mapping[str, Sequence[int]], rows_by_id: Mapping[str, int], max_draft: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of the runner's tensor of drafts, int64 [requests], and what to write there, int64 [requests, K].

    Padding, which is below 0 in a draft, becomes token 0, because the model looks up its embedding. vLLM never accepts
    the padding of its scheduler, whatever its token.
    """
    rows = np.array([rows_by_id[request_id] for request_id in drafts], np.int64)
    tokens = np.zeros((len(drafts), max_draft), np.int64)
    for row, draft in zip(tokens, drafts.values(), strict=True):
        row[: len(draft)] = draft
    return rows, np.maximum(tokens, 0)


def to_device(array: np.ndarray, device: Any) -> Any:
    """Copy an array to a device without waiting for the work that runs there."""
    import torch

    tensor = torch.from_numpy(array)
    return tensor.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else tensor.to(device)
