"""vLLM's worker, with a V2 model runner that has drafts.

In the variant `V2_SCHEDULER` the scheduler puts drafts into the `SchedulerOutput` of each step, which all workers get.
The V2 runner reads only their lengths there, and their ids in a tensor on the device, where vLLM's speculators write
them.

In the variant `V2_WORKER` the scheduler is a step ahead. The first tensor-parallel rank waits for the tokens of a step,
requests drafts, and sends these to the others on the device, so that these do not wait.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from drafter_service.plugins.session import HostSession
from drafter_service.plugins.vllm.engine import open_session
from drafter_service.plugins.vllm.scheduler import REPORT
from drafter_service.plugins.vllm.variants import Variant, choose
from ssd.budget.padding import Padding


@functools.cache
def worker_class() -> type:
    """Return vLLM's worker, whose V2 model runner has drafts if the configuration says so."""
    from vllm.v1.worker.gpu_worker import Worker

    class DraftingWorker(Worker):  # type: ignore[misc]
        def _make_model_runner(self) -> Any:
            variant = choose(self.vllm_config).variant
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


@functools.cache
def speculating_runner_class() -> type:
    """Return vLLM's V2 model runner with a speculator that drafts for it."""
    import torch
    from vllm.distributed.parallel_state import get_tp_group
    from vllm.v1.worker.gpu.model_runner import GPUModelRunner

    class Speculator(null_speculator_class()):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config.speculative_config.num_speculative_tokens, device)
            self._group = get_tp_group()
            self.sampled: tuple[Any, Any] = (None, None)
            """Tokens of the step, int64 [requests, up to K + 1], and their number, [requests], on the device."""
            self.drafts: WorkerDrafts | None = None
            # A late answer must not make ranks verify different drafts, so one of them drafts for all.
            if self._group.rank_in_group == 0:
                context_window = vllm_config.model_config.max_model_len
                session = open_session(vllm_config, Padding(lengths=(self.max_draft,)))
                self.drafts = WorkerDrafts(session, self.max_draft, context_window)

        def propose(self, input_batch: Any, *_: Any, dummy_run: bool = False, **__: Any) -> Any:
            """Return the drafts for the next step, int64 [requests, K], after the tokens of this one are known."""
            drafts = super().propose(input_batch)
            if dummy_run:
                return drafts
            if self.drafts is not None:
                tokens, counts = self.sampled
                # One copy from the device, which waits for the step.
                step = torch.cat((tokens, counts[:, None].to(tokens.dtype)), 1).cpu().numpy()
                lengths = input_batch.num_draft_tokens_per_req
                if lengths is None:
                    lengths = np.zeros(len(step), np.int64)
                found = self.drafts.after_step(input_batch.req_ids, step[:, :-1], step[:, -1], lengths)
                drafts = to_device(found, self.device)
            return self._group.broadcast(drafts, src=0)

    class SpeculatingModelRunner(GPUModelRunner):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, device: Any) -> None:
            super().__init__(vllm_config, device)
            self.speculator = Speculator(vllm_config, device)

        def update_requests(self, scheduler_output: Any) -> None:
            """Update the running requests of a step, and begin and end requests of the drafter."""
            super().update_requests(scheduler_output)
            if self.speculator.drafts is not None:
                self.speculator.drafts.update(scheduler_output)

        def postprocess_sampled(
            self, idx_mapping: Any, sampled_tokens: Any, num_sampled: Any, *args: Any, **kwargs: Any
        ) -> None:
            """Keep the tokens of a step for `propose`, which the host calls next."""
            super().postprocess_sampled(idx_mapping, sampled_tokens, num_sampled, *args, **kwargs)
            self.speculator.sampled = sampled_tokens, num_sampled

        def shutdown(self) -> None:
            """Close the connection to the sidecar, and shut down."""
            if self.speculator is not None and self.speculator.drafts is not None:
                self.speculator.drafts.close()
            super().shutdown()

    return SpeculatingModelRunner


@dataclass(slots=True)
class RunningText:
    """The text of a request in the worker. The scheduler's report of its end comes later."""

    tokens: list[int]
    prompt_length: int
    max_length: int
    """Length at which the host ends the request."""
    stops: frozenset[int]
    """Tokens that end it."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add the tokens of a step up to the one where the host ends the request."""
        for token in tokens:
            if self.is_complete:
                return
            self.tokens.append(token)

    @property
    def is_complete(self) -> bool:
        """Whether the host ends the request here."""
        length = len(self.tokens)
        return length >= self.max_length or (length > self.prompt_length and self.tokens[-1] in self.stops)


class WorkerDrafts:
    """The drafts of a worker's requests. Imports none of the host's modules."""

    def __init__(self, session: HostSession, max_draft: int, context_window: int) -> None:
        """max_draft: width of the host's drafts, in tokens. context_window: maximum length of a text."""
        self.session = session
        self._max_draft = max_draft
        self._context_window = context_window
        self._texts: dict[str, RunningText] = {}
        self._given: dict[str, list[int]] = {}
        """The draft of each request for the next step."""

    def update(self, scheduler_output: Any) -> None:
        """Begin and end requests with a `SchedulerOutput` that has a `StepReport`."""
        report = getattr(scheduler_output, REPORT, None)
        if report is None:
            return
        with self.session.guarded():
            for request_id, (end, length) in report.ended.items():
                text = self._texts.pop(request_id, None)
                self._given.pop(request_id, None)
                if text is not None:
                    self.session.finish(request_id, text.tokens[:length], end)
            for new in scheduler_output.scheduled_new_reqs:
                if (options := report.started.get(new.req_id)) is None:
                    continue
                self._given.pop(new.req_id, None)
                sampling, prompt = new.sampling_params, new.prompt_token_ids
                self._texts[new.req_id] = RunningText(
                    list(new.prefill_token_ids),
                    len(prompt),
                    min(self._context_window, len(prompt) + (options.max_tokens or self._context_window)),
                    frozenset({*(sampling.stop_token_ids or ()), sampling.eos_token_id} - {None}),
                )
                if new.req_id not in self.session:  # Not one that continues after it was preempted.
                    self.session.start(new.req_id, prompt, options, sampling.extra_args)

    def after_step(
        self, request_ids: Sequence[str], tokens: np.ndarray, counts: np.ndarray, lengths: np.ndarray
    ) -> np.ndarray:
        """Return drafts for the next step, int64 [requests, K]; the host verifies K tokens for every request.

        A shorter draft is padded with the last token of the text. tokens: int64 [requests, up to K + 1], of which
        `counts` are valid. lengths: number of draft tokens that the step verified. counts, lengths: [requests].
        """
        drafts = np.zeros((len(request_ids), self._max_draft), np.int64)
        with self.session.guarded():
            ready = []
            for row, (request_id, count) in enumerate(zip(request_ids, counts.tolist(), strict=True)):
                text = self._texts.get(request_id)
                if text is None or not count:
                    continue
                drafts[row] = tokens[row, count - 1]
                if (given := self._given.pop(request_id, None)) and lengths[row]:
                    self.session.schedule({request_id: given[: lengths[row]]})
                text.extend(tokens[row, :count].tolist())
                if not text.is_complete:
                    ready.append((row, request_id, text.tokens))
            found = self.session.draft([(request_id, text) for _, request_id, text in ready])
            for (row, request_id, _), draft in zip(ready, found, strict=True):
                self._given[request_id] = draft
                drafts[row, : len(draft)] = draft
        return drafts

    def close(self) -> None:
        """Close the session."""
        self.session.close()
