"""vLLM's asynchronous scheduler, which reports beginnings and ends of requests to the workers, of which one drafts."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.vllm.engine_session import LOG, variant_of
from drafter_service.plugins.vllm.requests import OptionsReader, end_of
from drafter_service.plugins.vllm.variants import Variant

REPORT = "ssd_report"
"""Attribute of `SchedulerOutput` that has the `StepReport`."""


@dataclass(frozen=True)
class StepReport:
    """Requests that begin with a step, and those that ended before it."""

    started: dict[str, RequestOptions]
    ended: dict[str, tuple[End, int]]
    """How each request ended, and the length of its text, prompt included."""


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

    def _free_request(self, request: Any, *args: Any, **kwargs: Any) -> Any:
        """End a request."""
        if self._is_drafting:
            self._ended[request.request_id] = end_of(request.status.name), len(request.all_token_ids)
        return super()._free_request(request, *args, **kwargs)  # type: ignore[misc]


@functools.cache
def scheduler_class() -> type:
    """Return vLLM's asynchronous scheduler with reports."""
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    members = {"__module__": "drafter_service.plugins.vllm"}
    return type("AsyncScheduler", (SchedulerWithReports, AsyncScheduler), members)
