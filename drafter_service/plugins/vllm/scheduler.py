"""vLLM's schedulers, of which one process has one, whatever the parallelism.

The synchronous one has the drafts of the sidecar. The asynchronous one reports beginnings and ends of requests to the
workers, of which one drafts.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from time import perf_counter
from typing import TYPE_CHECKING, Any

from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.vllm.engine import LOG, OptionsReader, end_of, open_session, padding_of, variant_of
from drafter_service.plugins.vllm.variants import NETWORKS, Variant

REPORT = "ssd_report"
"""Attribute of `SchedulerOutput` that has the `StepReport`."""
STEP_LENGTH = "ssd_step_length"
"""Attribute of `ModelRunnerOutput` that has the number of draft tokens to verify in a later step, if a worker chose it.
"""


@dataclass(frozen=True)
class StepReport:
    """Requests that begin with a step, and those that ended before it."""

    started: dict[str, RequestOptions]
    ended: dict[str, tuple[End, int]]
    """How each request ended, and the length of its text, prompt included."""


class SchedulerWithDrafts:
    """The methods that are added to vLLM's scheduler; `scheduler_class` combines the two.

    Arguments are passed on as they are, so that a version of vLLM that is not supported runs as without this class.
    """

    if TYPE_CHECKING:  # Attributes of vLLM's scheduler.
        requests: dict[str, Any]
        running: list[Any]
        waiting: Any
        max_num_running_reqs: int
        max_num_scheduled_tokens: int
        structured_output_manager: Any
        vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError if the engine schedules asynchronously, which vLLM's synchronous scheduler cannot do."""
        super().__init__(*args, **kwargs)
        self.ssd_session: HostSession | None = None
        self._options = OptionsReader(LOG.warning)
        self._max_draft = 0
        """Longest draft of the next step."""
        self._has_network = False
        """Whether the workers run a network that drafts."""
        self._in_flight = 0
        """Number of scheduled steps whose outputs have not been processed."""
        self._began: float | None = None
        """Time at which the last step began, after drafts were requested; None if others were in flight."""
        self._is_admitting = True
        """Whether waiting requests are likely to begin in the next step, rather than wait for memory."""
        self._ended: tuple[int, int] | None = None
        """Number of tokens and of sequences of the last step, after which the next one follows at once."""
        if variant_of(self.vllm_config) is not Variant.NONE:
            self.ssd_session = open_session(self.vllm_config, padding_of(self.vllm_config.compilation_config))
            self._max_draft = self.vllm_config.speculative_config.num_speculative_tokens
            self._has_network = self.vllm_config.speculative_config.method in NETWORKS

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Give drafts to the running requests, and schedule a step."""
        session = self.ssd_session
        if session is None:
            return super().schedule(*args, **kwargs)  # type: ignore[misc]
        with session.guarded():
            # What the host does between two steps is part of their duration.
            if self._ended is not None and self._began is not None:
                session.record_step(*self._ended, perf_counter() - self._began)
            self._ended = None
            self._offer_drafts(session)
        self._began = None if self._in_flight else perf_counter()
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        self._in_flight += 1
        with session.guarded():
            self._record_scheduled(session, output)
        return output

    def update_from_output(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """Process the output of a step."""
        outputs = super().update_from_output(scheduler_output, *args, **kwargs)  # type: ignore[misc]
        self._in_flight -= 1
        if self.ssd_session is not None and (self.running or self.waiting):
            with self.ssd_session.guarded():
                if tokens := scheduler_output.total_num_scheduled_tokens:
                    self._ended = tokens, len(scheduler_output.num_scheduled_tokens)
        return outputs

    def update_draft_token_ids(self, draft_token_ids: Any) -> None:
        """Give the drafts of the workers' network to the requests; `schedule` replaces them by better ones."""
        if self.ssd_session is None or self._has_network:
            super().update_draft_token_ids(draft_token_ids)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """End a request."""
        if self.ssd_session is not None:
            with self.ssd_session.guarded():
                self.ssd_session.finish(request.request_id, request.all_token_ids, end_of(request.status.name))
        self._is_admitting = True
        freed = super()._free_request(request, *args, **kwargs)  # type: ignore[misc]
        if not (self.running or self.waiting):
            self._ended = None  # What follows is not a part of the last step.
        return freed

    def shutdown(self, *args: Any, **kwargs: Any) -> None:
        """Close the connection to the sidecar, and shut down."""
        if self.ssd_session is not None:
            self.ssd_session.close()
        super().shutdown(*args, **kwargs)  # type: ignore[misc]

    def _offer_drafts(self, session: HostSession) -> None:
        """Write drafts into the running requests that are not in the middle of their prompt or of a step."""
        ready = [
            request
            for request in self.running
            if not request.is_prefill_chunk and not request.num_in_flight_tokens and request.request_id in session
        ]
        texts = [(request.request_id, request.all_token_ids) for request in ready]
        networks = [request.spec_token_ids for request in ready] if self._has_network else ()
        others = sum(not request.is_prefill_chunk for request in self.running) - len(ready)
        drafts = session.draft(texts, self._expected_prompt_tokens(len(ready) + others), others, networks)
        for request, draft in zip(ready, drafts, strict=True):
            tokens = draft[: self._max_draft]
            if tokens and request.use_structured_output:
                tokens = self.structured_output_manager.validate_tokens(request, tokens)
            request.spec_token_ids = tokens

    def _expected_prompt_tokens(self, decoding: int) -> int:
        """Return how many prompt tokens the host is likely to run in the next step beside `decoding` requests."""
        tokens = sum(
            request.num_tokens - request.num_computed_tokens for request in self.running if request.is_prefill_chunk
        )
        free = self.max_num_running_reqs - len(self.running) if self._is_admitting else 0
        tokens += sum(request.num_prompt_tokens for request in islice(self.waiting, max(0, free)))
        return max(0, min(tokens, self.max_num_scheduled_tokens - decoding))

    def _record_scheduled(self, session: HostSession, output: Any) -> None:
        """Record which drafts a step verifies, and start the requests that begin in it."""
        scheduled = output.scheduled_spec_decode_tokens
        session.schedule(scheduled)
        padding = {
            request_id: sum(token < 0 for token in tokens)
            for request_id, tokens in scheduled.items()
            if tokens and tokens[-1] < 0
        }
        if padding:
            # vLLM pads requests whose whole prompt is cached. Its counters leave out what is named here.
            output.num_invalid_spec_tokens = {**(output.num_invalid_spec_tokens or {}), **padding}
        if not self._has_network:  # With one, this is the length of its drafts.
            self._max_draft = output.num_spec_tokens_to_schedule
        self._is_admitting = bool(output.scheduled_new_reqs)
        for data in output.scheduled_new_reqs:
            if data.req_id not in session:
                self._start(session, self.requests[data.req_id])

    def _start(self, session: HostSession, request: Any) -> None:
        """Start a request that can have drafts."""
        if (options := self._options.options_of(request)) is None:
            return
        prompt: Sequence[int] = request.all_token_ids[: request.num_prompt_tokens]
        session.start(request.request_id, prompt, options, request.sampling_params.extra_args)


@functools.cache
def scheduler_class() -> type:
    """Return vLLM's scheduler with drafts."""
    from vllm.v1.core.sched.scheduler import Scheduler

    return type("Scheduler", (SchedulerWithDrafts, Scheduler), {"__module__": "drafter_service.plugins.vllm"})


class SchedulerWithReports:
    """The methods that are added to vLLM's asynchronous scheduler; `scheduler_class` combines the two."""

    if TYPE_CHECKING:  # Attributes of vLLM's scheduler.
        requests: dict[str, Any]
        vllm_config: Any

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Raise ValueError if the engine does not schedule asynchronously."""
        super().__init__(*args, **kwargs)
        self._is_drafting = variant_of(self.vllm_config) is not Variant.NONE
        self._options = OptionsReader(LOG.warning)
        self._ended: dict[str, tuple[End, int]] = {}
        self._step_length: int | None = None
        """Number of draft tokens that the next step verifies for each request; None: the host decides."""
        speculative = self.vllm_config.speculative_config
        if self._is_drafting and speculative.method in NETWORKS:
            # vLLM's number counts the network's tokens alone; drafts of the corpus may be longer.
            self._step_length = speculative.num_speculative_tokens

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        """Schedule a step, and add a report to it."""
        output = super().schedule(*args, **kwargs)  # type: ignore[misc]
        if self._is_drafting:
            started = {}
            for data in output.scheduled_new_reqs:
                if (options := self._options.options_of(self.requests[data.req_id])) is not None:
                    started[data.req_id] = options
            setattr(output, REPORT, StepReport(started, self._ended))
            self._ended = {}
        return output

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        """Process the output of a step."""
        self._step_length = getattr(model_runner_output, STEP_LENGTH, self._step_length)
        return super().update_from_output(scheduler_output, model_runner_output)  # type: ignore[misc]

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        """Update the requests of a step, after setting the number of draft tokens that their next step verifies."""
        if self._step_length is not None:
            scheduler_output.num_spec_tokens_to_schedule = self._step_length
        super()._update_after_schedule(scheduler_output)  # type: ignore[misc]

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """End a request."""
        if self._is_drafting:
            self._ended[request.request_id] = end_of(request.status.name), len(request.all_token_ids)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def async_scheduler_class() -> type:
    """Return vLLM's asynchronous scheduler with reports."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    members = {"__module__": "drafter_service.plugins.vllm"}
    return type("AsyncScheduler", (SchedulerWithReports, AsyncScheduler), members)
