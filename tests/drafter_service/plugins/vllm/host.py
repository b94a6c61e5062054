"""vLLM's scheduler, worker and V2 model runner on a machine without a GPU.

The scheduler and the runner are the host's own, and so are its Triton kernels, which Triton's interpreter runs. What
needs CUDA is written out here: the forward pass with its sampling (`target` says what the model produces), and streams.
"""

import functools
import os
import pickle
from collections import deque
from contextlib import nullcontext
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest
import torch

from drafter_service.plugins.vllm.variants import ASYNC_SCHEDULER, PROPOSER, SCHEDULER, WORKER
from tests.drafter_service.plugins.helpers import plain, verified

MODEL = str(Path(__file__).parents[4] / "engine" / "models" / "assets" / "stdlib-7m")
BLOCK = 32
MAX_MODEL_LEN = 256
VOCAB_SIZE = 4096
V1 = {"method": "custom_class", "model": PROPOSER}
"""Speculation of the V1 model runner."""
ASYNC = {"scheduler": ASYNC_SCHEDULER, "is_asynchronous": True}
"""Options of `vllm_config` for the asynchronous scheduler."""


def import_vllm():
    """Import the parts of vLLM that the tests use, for its CPU platform; skip the test where the host is missing."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; make hosts-conformance installs it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    # The host uses Triton without a driver where devices are hidden.
    os.environ.update(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    try:
        from vllm import __version__, platforms
        from vllm.platforms.cpu import CpuPlatform

        # Without compiled code the host finds no platform.
        platforms._current_platform = CpuPlatform()
        from vllm.v1.worker import gpu_worker  # noqa: F401
        from vllm.v1.worker.gpu import model_runner  # noqa: F401

        if not __version__.startswith("0.33."):
            pytest.skip(f"these tests are for vLLM 0.33, not {__version__}")
    except ImportError as problem:
        pytest.skip(f"vLLM cannot be imported here: {problem}")


def vllm_config(
    *,
    speculation=None,
    budget=64,
    scheduler=SCHEDULER,
    worker=WORKER,
    is_asynchronous=False,
    is_adaptive=False,
    stages=1,
    ranks=1,
):
    """Return a `VllmConfig` of the plug-in's flags for the V2 model runner."""
    from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SpeculativeConfig, VllmConfig
    from vllm.config.scheduler import SchedulerConfig

    model = ModelConfig(model=MODEL, max_model_len=MAX_MODEL_LEN)
    parallel = ParallelConfig(worker_cls=worker)
    config = VllmConfig(
        model_config=model,
        device_config=DeviceConfig("cpu"),
        cache_config=CacheConfig(block_size=BLOCK),
        parallel_config=parallel,
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=budget,
            max_model_len=MAX_MODEL_LEN,
            is_encoder_decoder=False,
            scheduler_cls=scheduler,
        ),
        speculative_config=SpeculativeConfig(
            **{"method": "ngram", "num_speculative_tokens": 4, **(speculation or {})},
            target_model_config=model,
            target_parallel_config=parallel,
        ),
    )
    config.scheduler_config.async_scheduling = is_asynchronous  # The host's CPU platform has no asynchronous one.
    config.speculative_config.enable_adaptive_verification = is_adaptive  # Nor has it CUDA graphs.
    config.parallel_config.pipeline_parallel_size = stages  # There are no devices for them.
    config.parallel_config.tensor_parallel_size = ranks
    return config


class Engine:
    """An engine with the host's scheduler, and with its V2 model runner if the configuration has one."""

    def __init__(self, config, monkeypatch, blocks=60):
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
        from vllm.v1.structured_output import StructuredOutputManager

        init_none_hash(sha256)
        self.block_hasher = get_request_block_hasher(BLOCK, sha256)
        cache = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config.cache_config.num_gpu_blocks = blocks
        self.scheduler = config.scheduler_config.get_scheduler_cls()(
            config,
            KVCacheConfig(blocks, [], [KVCacheGroupSpec(["layer"], cache)]),
            StructuredOutputManager(config),
            block_size=BLOCK,
            log_stats=True,
        )
        self.is_asynchronous = config.scheduler_config.async_scheduling
        self.link = Link()
        self.runner = make_runner(config, monkeypatch, self.link) if config.use_v2_model_runner else None
        self.other = None
        """The runner of the first pipeline stage, or of the second tensor-parallel rank, if there are two."""
        if config.parallel_config.pipeline_parallel_size > 1:
            self.other = make_runner(config, monkeypatch, self.link, is_last_stage=False)
            connect_stages(self.other, self.runner, self.link, monkeypatch)
        elif config.parallel_config.tensor_parallel_size > 1:
            self.other = make_runner(config, monkeypatch, self.link, rank=1)
        self.depth = config.max_concurrent_batches - 1
        self.in_flight = []
        self.steps = self.preemptions = self.padded = 0
        self.drafted = self.accepted = 0
        """As the host counts them."""
        self.verified = 0
        """Number of draft tokens that the runner has verified, padding included."""
        self.lengths = set()
        """Lengths of the drafts that were scheduled."""
        self.outputs = {}

    def add(self, request_id, prompt, max_tokens=30, **more):
        from vllm import SamplingParams
        from vllm.v1.request import Request

        params = {name: more.pop(name) for name in ("stop", "extra_args", "stop_token_ids") if name in more}
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, **params, detokenize=True)
        request = Request(request_id, prompt, sampling, None, block_hasher=self.block_hasher, **more)
        self.scheduler.add_request(request)
        self.outputs[request_id] = []

    def run(self):
        """Run until all requests have ended; return their outputs."""
        while self.scheduler.has_requests() or self.in_flight:
            self.step()
        return list(self.outputs.values())

    def step(self):
        """Schedule a step, run it, and process the oldest one whose outcome is known."""
        output = None
        if self.scheduler.has_requests():
            output = self.scheduler.schedule()
            self.lengths |= {*map(len, output.scheduled_spec_decode_tokens.values())}
            self.padded += sum(-1 in draft for draft in output.scheduled_spec_decode_tokens.values())
            self.preemptions += len(output.preempted_req_ids or ())
            self.steps += bool(output.num_scheduled_tokens)
            # Workers are other processes.
            copy = pickle.loads(pickle.dumps(output))
            result = self.execute(copy) if self.runner else self.execute_v1(copy)
            self.in_flight.append((output, result))
        if len(self.in_flight) > (self.depth if output is not None else 0):
            self.process(*self.in_flight.pop(0))

    def process(self, output, result):
        for per_client in self.scheduler.update_from_output(output, result).values():
            for one in per_client.outputs:
                self.outputs[one.request_id] += one.new_token_ids
            if per_client.scheduler_stats and (stats := per_client.scheduler_stats.spec_decoding_stats):
                self.drafted += stats.num_draft_tokens
                self.accepted += stats.num_accepted_tokens
        if not self.is_asynchronous and self.runner and output.num_scheduled_tokens:
            self.scheduler.update_draft_token_ids(self.runner.take_draft_token_ids())

    def execute(self, output):
        """Run a step with the V2 model runner; return its `ModelRunnerOutput`."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT

        other = self.prepare(self.other, output) if self.other else None
        batch = self.prepare(self.runner, output)
        if batch is None:
            return EMPTY_MODEL_RUNNER_OUTPUT
        self.verified += batch.num_draft_tokens
        result = self.runner.sample_tokens(None).get_output()
        if other is not None:
            # All layers run the tokens that are verified, for the same requests.
            assert other.input_ids.tolist() == batch.input_ids.tolist()
            assert other.query_start_loc.tolist() == batch.query_start_loc.tolist()
            self.link.is_sending = False
            self.other.sample_tokens(None)
            self.link.is_sending = True
        return result

    def prepare(self, runner, output):
        """Prepare a step as `execute_model` of the host does; return its `InputBatch`, None if nothing runs."""
        from vllm.config.compilation import CUDAGraphMode
        from vllm.v1.worker.gpu.cudagraph_utils import BatchExecutionDescriptor
        from vllm.v1.worker.gpu.model_runner import ExecuteModelState

        runner.update_pp_decode_requests()
        for prepare in (runner.finish_requests, runner.free_states, runner.add_requests, runner.update_requests):
            prepare(output)
        if not output.num_scheduled_tokens:
            return None
        state, _ = runner.gather_batch_req_state(output, dummy_run=False)
        shape = BatchExecutionDescriptor(CUDAGraphMode.NONE, state.num_tokens, None)
        batch = runner.prepare_inputs(output, state, shape, 0)
        drafts = 0 if output.skip_drafts else output.num_spec_tokens_to_schedule
        runner.execute_model_state = ExecuteModelState(
            batch, None, None, torch.zeros(1), None, None, output.finished_req_ids, None, None, drafts
        )
        return batch

    def execute_v1(self, output):
        """Run a step as the V1 model runner does: it takes the drafts of the scheduler."""
        from vllm.v1.outputs import EMPTY_MODEL_RUNNER_OUTPUT, ModelRunnerOutput

        if not output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        sampled = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            request = self.scheduler.requests[request_id]
            draft = output.scheduled_spec_decode_tokens.get(request_id, [])
            # The scheduler has counted the tokens of the step already.
            ends_at = request.num_computed_tokens - len(draft)
            text = list(request.all_token_ids)
            assert scheduled > len(draft)
            sampled.append(verified(text, draft) if ends_at == len(text) else [])
        ids = list(output.num_scheduled_tokens)
        return ModelRunnerOutput(ids, {request_id: at for at, request_id in enumerate(ids)}, sampled)


class Link:
    """What one runner sends and the other one receives."""

    def __init__(self):
        self.sent, self.is_sending = deque(), True

    def broadcast(self, tensor, **_):
        if self.is_sending:
            self.sent.append(tensor.clone())
        else:
            tensor.copy_(self.sent.popleft())
        return tensor


def make_runner(config, monkeypatch, link, *, is_last_stage=True, rank=0):
    """Return the model runner that the worker of a configuration makes, without the parts that need a GPU."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.gpu import buffer_utils, model_runner

    is_alone = config.parallel_config.tensor_parallel_size == 1
    group = SimpleNamespace(rank_in_group=rank, broadcast=(lambda tensor, src: tensor) if is_alone else link.broadcast)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    monkeypatch.setattr(
        model_runner.GPUModelRunner, "__init__", functools.partialmethod(initialize, is_last_stage=is_last_stage)
    )
    monkeypatch.setattr(model_runner.GPUModelRunner, "sample", sample)
    monkeypatch.setattr(model_runner.GPUModelRunner, "shutdown", lambda _: None)
    monkeypatch.setattr(model_runner, "AsyncOutput", Output)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    worker = worker_class.__new__(worker_class)
    worker.vllm_config, worker.device, worker.use_v2_model_runner = config, torch.device("cpu"), True
    runner = worker._make_model_runner()
    if runner.speculator is not None:
        runner.speculator.states = runner.req_states
    if runner.speculator is not None and runner.speculator.enable_adaptive_verification:
        runner.adaptive_verification = make_adaptive_verification(runner, monkeypatch)
    return runner


def make_adaptive_verification(runner, monkeypatch):
    """Return the host's manager of the number of draft tokens; 40 tokens take as long as the rest of a step."""
    from vllm.v1.worker.gpu.spec_decode import adaptive_verification

    hide_streams(monkeypatch)
    monkeypatch.setattr(adaptive_verification, "stream", lambda *_: nullcontext())
    eager = adaptive_verification._assign_draft_token_budget
    monkeypatch.setattr(adaptive_verification, "_assign_draft_token_budget_compiled", eager)
    manager = adaptive_verification.AdaptiveVerificationManager(
        runner.req_states, runner.input_buffers.query_start_loc, 1, max_total_logits=1000
    )
    manager.cost_tables = np.zeros(9), 1 + np.arange(200) / 40
    return manager


def connect_stages(first, last, link, monkeypatch):
    """Give the runners of two stages the host's handlers of a pipeline."""
    from vllm.v1.worker.gpu import pp_utils

    hide_streams(monkeypatch)
    for runner, is_last in ((first, False), (last, True)):
        group = SimpleNamespace(
            is_last_rank=is_last, last_rank=1, world_size=2, make_sibling_device_group=lambda **_: None
        )
        monkeypatch.setattr(pp_utils, "get_pp_group", lambda group=group: group)
        runner.pp_handler, runner.use_pp = pp_utils.PPHandler(8, runner.num_speculative_steps, runner.device), True

    monkeypatch.setattr(torch.distributed, "broadcast", link.broadcast)


def hide_streams(monkeypatch):
    """Let streams and events of devices do nothing."""
    for name in ("Stream", "Event", "current_stream", "stream"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)


def initialize(self, vllm_config, device, *, is_last_stage):
    """Set the attributes of a runner that its methods for requests and sampling use."""
    from vllm.v1.worker.gpu.input_batch import InputBuffers
    from vllm.v1.worker.gpu.kv_connector import KVConnector
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
    from vllm.v1.worker.gpu.states import RequestState

    self.vllm_config, self.device = vllm_config, device
    self.num_speculative_steps = vllm_config.num_speculative_tokens
    self.decode_query_len = self.num_speculative_steps + 1
    self.vocab_size, self.max_model_len = VOCAB_SIZE, MAX_MODEL_LEN
    self.max_num_reqs = 8
    self.model_config = vllm_config.model_config
    self.req_states = RequestState(8, MAX_MODEL_LEN, 64, self.num_speculative_steps, VOCAB_SIZE, device, 1, True)
    self.input_buffers = InputBuffers(8, 128, device)
    self.draft_tokens_handler = DraftTokensHandler.__new__(DraftTokensHandler)
    self.kv_connector, self.kv_block_zeroer = KVConnector(), mock.Mock()
    self.is_last_pp_rank = is_last_stage
    self.use_pp, self.check_ep_fault, self._draft_workspace_lane = False, False, 0
    self.speculator = None
    if self.is_last_pp_rank:
        has_network = vllm_config.speculative_config.method == "draft_model"
        self.speculator = network_class()(vllm_config, device) if has_network else BaseSpeculator
    for name in ("pooling_runner", "pp_handler", "encoder_cache", "adaptive_verification", "pcp_manager"):
        setattr(self, name, None)
    self.aux_output_connector = self.main_stream = self.output_copy_stream = self.execute_model_state = None
    self.fast_prefill = None
    for name in ("model", "model_state", "block_tables", "lora_state", "sampler", "prompt_logprobs_worker", "eplb"):
        setattr(self, name, mock.MagicMock())
    self.model.get_mtp_target_hidden_states = self.sampler.penalties_state.output_bin_counts = None
    self.model_state.num_new_sampled_tokens_per_step = 1
    self.prompt_logprobs_worker.compute_prompt_logprobs.return_value = {}
    self.prompt_logprobs_worker.compute_prompt_token_id_logprobs.return_value = {}


@functools.cache
def network_class():
    """Return the host's speculator with a draft model, whose first two tokens are right, and the third one wrong."""
    from vllm.v1.worker.gpu.spec_decode.standalone_ar.speculator import StandaloneARSpeculator

    class Network(StandaloneARSpeculator):
        def propose(self, input_batch, *_, num_speculative_tokens=None, dummy_run=False, **__):
            self.lengths = {*getattr(self, "lengths", ()), num_speculative_tokens}
            for row, at in enumerate([] if dummy_run else input_batch.idx_mapping.tolist()):
                text = self.states.all_token_ids.gpu[at, : self.states.total_len.gpu[at]].tolist()
                tokens = plain(text, self.num_speculative_steps)
                tokens[2] += 1
                self.draft_tokens[row] = torch.tensor(tokens)
            self.draft_token_confidence_probs.fill_(0.5)
            return self.draft_tokens[: input_batch.num_reqs]

    return Network


def sample(self, hidden_states, batch, grammar_output):
    """Verify the drafts on the device: the host's forward pass and rejection sampler, greedy."""
    states = self.req_states
    sampled = torch.full((batch.num_reqs, self.num_speculative_steps + 1 if batch.num_draft_tokens else 1), -7)
    counts, rejected = [], []
    starts, logits = batch.query_start_loc.tolist(), batch.cu_num_logits.diff().tolist()
    for at, row in enumerate(batch.idx_mapping.tolist()):
        total, computed = int(states.total_len.gpu[row]), int(states.num_computed_tokens.gpu[row])
        text = states.all_token_ids.gpu[row, :total].tolist()
        fed = batch.input_ids[starts[at] : starts[at + 1]].tolist()
        length = logits[at] - 1
        known, draft = fed[: len(fed) - length], fed[len(fed) - length :]
        assert known == text[computed : computed + len(known)]
        assert all(0 <= token < self.vocab_size for token in draft)  # Their embeddings are looked up.
        if computed + len(known) < total:
            counts.append(0)
            rejected.append(0)
            continue
        if total == int(states.prefill_len.np[row]):  # Padding of the scheduler.
            draft = []
        produced = verified(text, draft)
        sampled[at, : len(produced)] = torch.tensor(produced)
        counts.append(len(produced))
        rejected.append(length + 1 - len(produced))
    result = SimpleNamespace(sampled_token_ids=sampled)
    return result, torch.tensor(counts, dtype=torch.int32), torch.tensor(rejected, dtype=torch.int32)


class Output:
    """The output of a step, which the host copies from the device."""

    def __init__(self, model_runner_output, sampler_output, num_sampled_tokens, **_):
        rows = zip(sampler_output.sampled_token_ids.tolist(), num_sampled_tokens.tolist(), strict=True)
        model_runner_output.sampled_token_ids = [row[:count] for row, count in rows]
        self.model_runner_output = model_runner_output

    def get_output(self):
        return self.model_runner_output
