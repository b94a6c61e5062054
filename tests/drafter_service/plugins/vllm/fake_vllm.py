"""The parts of vLLM that its scheduler with drafts uses. Tests that have vLLM compare them with it.

`FakeScheduler` schedules all running requests in each step, verifies drafts as vLLM does, and fails where vLLM's engine
would.
"""

from __future__ import annotations

import inspect
import re
from dataclasses import dataclass, field
from enum import IntEnum
from types import SimpleNamespace

from tests.drafter_service.plugins.helpers import verified

VOCAB_SIZE = 50
MAX_MODEL_LEN = 100

REQUEST_ATTRIBUTES = {
    "all_token_ids",
    "cache_salt",
    "is_prefill_chunk",
    "lora_request",
    "max_tokens",
    "num_computed_tokens",
    "num_in_flight_tokens",
    "num_prompt_tokens",
    "num_tokens",
    "prompt_embeds",
    "request_id",
    "sampling_params",
    "session_id",
    "spec_token_ids",
    "status",
    "use_structured_output",
}
SCHEDULER_ATTRIBUTES = {"max_num_running_reqs", "max_num_scheduled_tokens", "running", "waiting"}
OUTPUT_ATTRIBUTES = {
    "num_invalid_spec_tokens",
    "num_scheduled_tokens",
    "num_spec_tokens_to_schedule",
    "scheduled_new_reqs",
    "scheduled_spec_decode_tokens",
    "total_num_scheduled_tokens",
}


class RequestStatus(IntEnum):
    WAITING = 1
    RUNNING = 2
    PREEMPTED = 3
    FINISHED_STOPPED = 4
    FINISHED_LENGTH_CAPPED = 5
    FINISHED_ABORTED = 6
    FINISHED_IGNORED = 7
    FINISHED_ERROR = 8
    FINISHED_REPETITION = 9


@dataclass(eq=False)
class Request:
    request_id: str
    prompt: list[int]
    max_tokens: int = 30
    sampling_params: SimpleNamespace | None = field(default_factory=lambda: SimpleNamespace(stop=[], extra_args=None))
    cache_salt: str | None = None
    session_id: str | None = None
    lora_request: object = None
    prompt_embeds: object = None
    use_structured_output: bool = False
    is_prefill_chunk: bool = False
    num_computed_tokens: int = 0
    num_in_flight_tokens: int = 0
    status: RequestStatus = RequestStatus.WAITING
    spec_token_ids: list[int] = field(default_factory=list)

    def __post_init__(self):
        self.all_token_ids = list(self.prompt)
        self.num_prompt_tokens = len(self.prompt)

    @property
    def output(self):
        return self.all_token_ids[self.num_prompt_tokens :]

    @property
    def num_tokens(self):
        return len(self.all_token_ids)


def vllm_config(drafts=8, **scheduler):
    """Return the parts of a `VllmConfig` that the plug-in reads."""
    return SimpleNamespace(
        model_config=SimpleNamespace(
            model="/nonexistent/model",
            revision=None,
            max_model_len=MAX_MODEL_LEN,
            get_vocab_size=lambda: VOCAB_SIZE,
        ),
        scheduler_config=SimpleNamespace(
            **{
                "scheduler_cls": "drafter_service.plugins.vllm.Scheduler",
                "async_scheduling": False,
                "max_num_seqs": 8,
                **scheduler,
            }
        ),
        speculative_config=SimpleNamespace(
            method="custom_class", model="drafter_service.plugins.vllm.NullProposer", num_speculative_tokens=drafts
        ),
        parallel_config=SimpleNamespace(
            pipeline_parallel_size=1,
            tensor_parallel_size=1,
            distributed_executor_backend="uni",
            worker_cls="",
            data_parallel_index=0,
        ),
        compilation_config=SimpleNamespace(cudagraph_mode=SimpleNamespace(name="NONE"), cudagraph_capture_sizes=[]),
        use_v2_model_runner=False,
    )


class FakeScheduler:
    def __init__(
        self,
        vllm_config,
        kv_cache_config=None,
        structured_output_manager=None,
        block_size=16,
        hash_block_size=None,
        mm_registry=None,
        include_finished_set=False,
        log_stats=False,
    ):
        self.vllm_config = vllm_config
        self.requests, self.running, self.waiting, self.freed = {}, [], [], []
        self.max_num_running_reqs, self.max_num_scheduled_tokens = 8, 64
        self.is_shut_down = False
        self.steps = self.verified = self.accepted = 0

    def add_request(self, request):
        self.requests[request.request_id] = request
        self.waiting.append(request)

    def schedule(self, throttle_prefills=False):
        drafts = {}
        for request in self.running:
            tokens, request.spec_token_ids = request.spec_token_ids, []
            assert len(tokens) <= self.vllm_config.speculative_config.num_speculative_tokens
            assert len(request.all_token_ids) + len(tokens) < MAX_MODEL_LEN
            assert all(type(token) is int and 0 <= token < VOCAB_SIZE for token in tokens)
            if tokens:
                drafts[request.request_id] = tokens
        new = [request for request in self.waiting if request.status is RequestStatus.WAITING]
        for request in self.waiting:
            request.status = RequestStatus.RUNNING
        self.running += self.waiting
        self.waiting = []
        scheduled = {}
        for request in self.running:
            scheduled[request.request_id] = 1 + len(drafts.get(request.request_id, ()))
            request.num_in_flight_tokens = scheduled[request.request_id]
        return SimpleNamespace(
            num_scheduled_tokens=scheduled,
            total_num_scheduled_tokens=sum(scheduled.values()),
            scheduled_spec_decode_tokens=drafts,
            scheduled_new_reqs=[SimpleNamespace(req_id=request.request_id) for request in new],
            num_invalid_spec_tokens=None,
            num_spec_tokens_to_schedule=self.vllm_config.speculative_config.num_speculative_tokens,
        )

    def update_draft_token_ids(self, draft_token_ids):
        for request_id, tokens in zip(draft_token_ids.req_ids, draft_token_ids.draft_token_ids, strict=True):
            self.requests[request_id].spec_token_ids = tokens

    def update_from_output(self, scheduler_output, model_runner_output=None):
        """Verify the drafts of a step with `target`, as the workers do."""
        for request in list(self.running):
            request.num_in_flight_tokens = 0
            if request.is_prefill_chunk:
                continue
            self.steps += 1
            drafts = scheduler_output.scheduled_spec_decode_tokens.get(request.request_id, [])
            self.verified += len(drafts)
            produced = verified(request.all_token_ids, drafts)[: request.max_tokens - len(request.output)]
            request.all_token_ids += produced
            self.accepted += len(produced) - 1
            if len(request.output) == request.max_tokens:
                self.finish_requests(request.request_id, RequestStatus.FINISHED_LENGTH_CAPPED)

    def finish_requests(self, request_ids, finished_status):
        for request_id in [request_ids] if isinstance(request_ids, str) else request_ids:
            request = self.requests[request_id]
            request.status = finished_status
            self._free_request(request, delay_free_blocks=False)

    def _free_request(self, request, delay_free_blocks=False):
        del self.requests[request.request_id]
        self.running = [each for each in self.running if each is not request]
        self.freed.append(request)
        return None, None

    def shutdown(self):
        self.is_shut_down = True


def compare_with_host():
    """Compare the signatures and names of this module with those of the installed vLLM."""
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.request import Request as HostRequest
    from vllm.v1.request import RequestStatus as HostStatus

    for name in ("schedule", "update_from_output", "update_draft_token_ids", "_free_request", "shutdown"):
        fake, real = (inspect.signature(getattr(each, name)) for each in (FakeScheduler, Scheduler))
        assert list(fake.parameters) == list(real.parameters)
    assert set(SchedulerOutput.__dataclass_fields__) >= OUTPUT_ATTRIBUTES
    assert [status.name for status in HostStatus if status > HostStatus.PREEMPTED] == [
        status.name for status in RequestStatus if status > RequestStatus.PREEMPTED
    ]
    source = inspect.getsource(HostRequest)
    source_of_scheduler = inspect.getsource(Scheduler.__init__)
    assert all(re.search(rf"self\.{name}( =|: )", source_of_scheduler) for name in SCHEDULER_ATTRIBUTES)
    missing = [name for name in REQUEST_ATTRIBUTES if f"self.{name}" not in source and f"def {name}" not in source]
    assert not missing
