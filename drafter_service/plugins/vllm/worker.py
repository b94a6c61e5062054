"""vLLM's worker, with a V2 model runner that has drafts.

In the variant `V2_SCHEDULER` the scheduler puts drafts into the `SchedulerOutput` of each step, which all workers get.
The V2 runner reads only their lengths there, and their ids in a tensor on the device, where vLLM's speculators write
them. In the variant `V2_WORKER` a speculator drafts (`speculator.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from drafter_service.plugins.vllm.engine import LOG, look_before_loading
from drafter_service.plugins.vllm.scheduler import STEP_LENGTH
from drafter_service.plugins.vllm.speculator import null_speculator_class, speculator_class, to_device
from drafter_service.plugins.vllm.variants import NETWORKS, Variant, choose
from drafter_service.plugins.vllm.worker_drafts import WorkerDrafts


@functools.cache
def worker_class() -> type:
    """Return vLLM's worker, whose V2 model runner has drafts if the configuration says so."""
    from vllm.v1.worker.gpu_worker import Worker

    class DraftingWorker(Worker):  # type: ignore[misc]
        def _make_model_runner(self) -> Any:
            variant = choose(self.vllm_config).variant
            if variant in (Variant.V2_SCHEDULER, Variant.V2_WORKER):
                look_before_loading(self.vllm_config)
            if variant is Variant.V2_SCHEDULER:
                return scheduled_runner_class()(self.vllm_config, self.device)
            if variant is Variant.V2_WORKER:
                return speculating_runner_class()(self.vllm_config, self.device)
            return super()._make_model_runner()

    return DraftingWorker


@functools.cache
def scheduled_runner_class() -> type:
    """Return vLLM's V2 model runner with the drafts of the scheduler."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    class DraftingModelRunner(GPUModelRunner):  # type: ignore[misc]
        speculator: Any

        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config, device)
            if self.speculator is not None:  # Only the last pipeline stage has one.
                self.speculator = null_speculator_class()(vllm_config, device)
            move_texts_to_host(self.req_states)

        def update_requests(self, scheduler_output: Any) -> None:
            """Update the running requests of a step, and copy its drafts to the device."""
            super().update_requests(scheduler_output)
            if drafts := scheduler_output.scheduled_spec_decode_tokens:
                states = self.req_states
                rows, tokens = draft_rows(drafts, states.req_id_to_index, states.num_speculative_steps)
                states.draft_tokens[to_device(rows, self.device)] = to_device(tokens, self.device)

    return DraftingModelRunner


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


@functools.cache
def speculating_runner_class() -> type:
    """Return vLLM's V2 model runner with a speculator that drafts for it."""
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    class SpeculatingModelRunner(GPUModelRunner):  # type: ignore[misc]
        speculator: Any

        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config, device)
            has_network = vllm_config.speculative_config.method in NETWORKS
            if self.speculator is not None:  # Only the last pipeline stage has one.
                base = type(self.speculator) if has_network else null_speculator_class()
                self.speculator = None  # Its memory is free before the next one is allocated.
                self.speculator = speculator_class(base)(vllm_config, device)
            if not has_network:
                move_texts_to_host(self.req_states)

        def initialize_kv_cache(self, *args: Any, **kwargs: Any) -> None:
            """Allocate the KV cache. If vLLM refuses a length per request there, all requests have the same."""
            try:
                super().initialize_kv_cache(*args, **kwargs)
            except ValueError as problem:
                if self.speculator is None or "adaptive verification" not in str(problem).lower():
                    raise
                LOG.warning(f"all requests of a step verify the same number of draft tokens: {problem}")
                self.speculator.verify_equal_lengths(self.vllm_config)
                self.rejection_sampler.enable_adaptive_verification = False
                super().initialize_kv_cache(*args, **kwargs)

        @property
        def ssd_drafts(self) -> WorkerDrafts | None:
            """The drafts of this rank; None if another one drafts."""
            return getattr(self.speculator, "drafts", None)

        def update_requests(self, scheduler_output: Any) -> None:
            """Update the running requests of a step, and begin and end requests of the drafter."""
            super().update_requests(scheduler_output)
            if self.ssd_drafts is not None:
                self.ssd_drafts.update(scheduler_output)

        def gather_batch_req_state(self, scheduler_output: Any, dummy_run: bool) -> Any:
            """Gather the state of a step's requests, after choosing the confidences that limit its drafts."""
            if self.adaptive_verification is not None and not dummy_run:
                with suppress(AttributeError):  # Private. Without them vLLM uses those of the step before.
                    use_latest_confidences(self.adaptive_verification)
            return super().gather_batch_req_state(scheduler_output, dummy_run)

        def postprocess_sampled(self, idx_mapping: Any, sampled_tokens: Any, *args: Any, **kwargs: Any) -> None:
            """Keep the tokens of a step for `propose`, which the host calls next."""
            super().postprocess_sampled(idx_mapping, sampled_tokens, *args, **kwargs)
            if self.speculator is not None:
                self.speculator.sampled = sampled_tokens

        def sample_tokens(self, grammar_output: Any) -> Any:
            """Finish a step, and tell the scheduler how many draft tokens are worth verifying."""
            output = super().sample_tokens(grammar_output)
            if self.ssd_drafts is not None and self.ssd_drafts.step_length is not None and output is not None:
                setattr(output.model_runner_output, STEP_LENGTH, self.ssd_drafts.step_length)
            return output

        def shutdown(self) -> None:
            """Close the connection to the sidecar, and shut down."""
            if self.ssd_drafts is not None:
                self.ssd_drafts.close()
            super().shutdown()

    return SpeculatingModelRunner


def move_texts_to_host(states: Any) -> None:
    """Replace the table of all tokens of a `RequestState`, which vLLM allocates on the device for its n-gram drafts.

    It is int32 [max_num_seqs, max_model_len]. With other methods vLLM keeps it in the host's memory, as here.
    """
    from vllm.v1.worker.gpu.buffer_utils import StagedWriteTensor

    size, kind = tuple(states.all_token_ids.gpu.shape), states.all_token_ids.dtype
    states.all_token_ids = None  # Its memory is free before the next one is allocated.
    states.all_token_ids = StagedWriteTensor(size, dtype=kind, device=states.device, uva_instead_of_gpu=True)


def use_latest_confidences(manager: Any) -> None:
    """Let an `AdaptiveVerificationManager` size a step by the confidences of the drafts that it verifies.

    vLLM uses those of the previous drafts, so that it need not wait for a copy. Here the first rank has waited for the
    tokens of the step before, and the copies of the others are complete at about the same time.
    """
    latest = manager._stale_idx ^ 1
    manager._copy_events[latest].synchronize()
    manager._stale_idx = latest
    if new := manager._pending_resets:  # Requests without drafts, whose padding vLLM counts as certain.
        manager._stale_confidences[latest].np[new] = 0.0
        manager._confidence_probs[to_device(np.array(new), manager._confidence_probs.device)] = 0.0
