"""vLLM's scheduler, worker and V2 model runner on a machine without a GPU.

The scheduler and the runner are the host's own. What needs CUDA is written out here: the forward pass with its sampling
(`target` says what the model produces), the kernels that update the state of requests, and streams.
"""

import os
import pickle
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from tests.drafter_service.plugins.helpers import verified

MODEL = str(Path(__file__).parents[4] / "engine" / "models" / "assets" / "stdlib-7m")
BLOCK = 32
MAX_MODEL_LEN = 256
VOCAB_SIZE = 4096


def import_vllm():
    """Import the parts of vLLM that the tests use, for its CPU platform; skip the test where the host is missing."""
    if find_spec("vllm") is None:
        pytest.skip("vLLM is not installed; make hosts-conformance installs it")
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
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
    scheduler="drafter_service.plugins.vllm.Scheduler",
    worker="drafter_service.plugins.vllm.Worker",
    is_asynchronous=False,
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
        self.runner = make_runner(config, monkeypatch) if config.use_v2_model_runner else None
        self.in_flight = []
        self.steps = self.preemptions = self.padded = 0
        self.drafted = self.accepted = 0
        """As the host counts them."""
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
            self.padded += sum(-1 in draft for draft in output.scheduled_spec_decode_tokens.values())
            self.preemptions += len(output.preempted_req_ids or ())
            self.steps += bool(output.num_scheduled_tokens)
            # Workers are other processes.
            copy = pickle.loads(pickle.dumps(output))
            result = self.execute(copy) if self.runner else self.execute_v1(copy)
            self.in_flight.append((output, result))
        if len(self.in_flight) > (self.is_asynchronous and output is not None):
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
        from vllm.v1.worker.gpu.model_runner import ExecuteModelState

        runner = self.runner
        for prepare in (runner.finish_requests, runner.free_states, runner.add_requests, runner.update_requests):
            prepare(output)
        if not output.num_scheduled_tokens:
            return EMPTY_MODEL_RUNNER_OUTPUT
        state, _ = runner.gather_batch_req_state(output, dummy_run=False)
        batch = SimpleNamespace(
            req_ids=state.req_ids,
            num_reqs=len(state.req_ids),
            idx_mapping=torch.from_numpy(state.idx_mapping_np),
            idx_mapping_np=state.idx_mapping_np,
            num_scheduled_tokens=state.num_scheduled_tokens,
            num_draft_tokens_per_req=state.num_draft_tokens_np,
            query_start_loc=torch.tensor([0, *state.num_scheduled_tokens.cumsum()]),
            has_structured_output_reqs=output.has_structured_output_requests,
            is_prefilling_np=state.is_prefilling_np,
        )
        drafts = 0 if output.skip_drafts else output.num_spec_tokens_to_schedule
        runner.execute_model_state = ExecuteModelState(
            batch, None, None, torch.zeros(1), None, None, output.finished_req_ids, None, None, drafts
        )
        return runner.sample_tokens(None).get_output()

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


def make_runner(config, monkeypatch):
    """Return the model runner that the worker of a configuration makes, without the parts that need a GPU."""
    from vllm.utils.import_utils import resolve_obj_by_qualname
    from vllm.v1.worker.gpu import buffer_utils, model_runner

    group = SimpleNamespace(rank_in_group=0, broadcast=lambda tensor, src: tensor)
    monkeypatch.setattr("vllm.distributed.parallel_state.get_tp_group", lambda: group)
    monkeypatch.setattr(model_runner.GPUModelRunner, "__init__", initialize)
    monkeypatch.setattr(model_runner.GPUModelRunner, "sample", sample)
    monkeypatch.setattr(model_runner, "post_update", post_update)
    monkeypatch.setattr(model_runner, "AsyncOutput", Output)
    monkeypatch.setattr(buffer_utils, "is_uva_available", lambda: False)
    monkeypatch.setattr(buffer_utils.StagedWriteTensor, "apply_write", apply_write)
    worker_class = resolve_obj_by_qualname(config.parallel_config.worker_cls)
    worker = worker_class.__new__(worker_class)
    worker.vllm_config, worker.device, worker.use_v2_model_runner = config, torch.device("cpu"), True
    return worker._make_model_runner()


def initialize(self, vllm_config, device):
    """Set the attributes of a runner that its methods for requests and sampling use."""
    from vllm.v1.worker.gpu.kv_connector import KVConnector
    from vllm.v1.worker.gpu.spec_decode.utils import DraftTokensHandler
    from vllm.v1.worker.gpu.states import RequestState

    self.vllm_config, self.device = vllm_config, device
    self.num_speculative_steps = vllm_config.num_speculative_tokens
    self.decode_query_len = self.num_speculative_steps + 1
    self.vocab_size, self.max_model_len = VOCAB_SIZE, MAX_MODEL_LEN
    self.req_states = RequestState(8, MAX_MODEL_LEN, 64, self.num_speculative_steps, VOCAB_SIZE, device, 1, True)
    self.draft_tokens_handler = DraftTokensHandler.__new__(DraftTokensHandler)
    self.kv_connector, self.kv_block_zeroer = KVConnector(), mock.Mock()
    self.is_last_pp_rank, self.use_pp, self.check_ep_fault, self._draft_workspace_lane = True, False, False, 0
    for name in ("pooling_runner", "pp_handler", "encoder_cache", "adaptive_verification", "pcp_manager"):
        setattr(self, name, None)
    self.aux_output_connector = self.main_stream = self.output_copy_stream = self.execute_model_state = None
    for name in ("model", "model_state", "block_tables", "lora_state", "sampler", "prompt_logprobs_worker", "eplb"):
        setattr(self, name, mock.MagicMock())
    self.model.get_mtp_target_hidden_states = None
    self.prompt_logprobs_worker.compute_prompt_logprobs.return_value = {}
    self.prompt_logprobs_worker.compute_prompt_token_id_logprobs.return_value = {}


def sample(self, hidden_states, batch, grammar_output):
    """Verify the drafts on the device: the host's rejection sampler, greedy."""
    states, width = self.req_states, self.num_speculative_steps + 1
    drafts = batch.num_draft_tokens_per_req
    drafts = [0] * batch.num_reqs if drafts is None else drafts.tolist()
    sampled, counts, rejected = torch.full((batch.num_reqs, width), -7), [], []
    for at, (row, scheduled, length) in enumerate(
        zip(batch.idx_mapping.tolist(), batch.num_scheduled_tokens.tolist(), drafts, strict=True)
    ):
        total = int(states.total_len.gpu[row])
        text = states.all_token_ids.gpu[row, :total].tolist()
        if int(states.num_computed_tokens.gpu[row]) + scheduled - length < total:
            counts.append(0)
            rejected.append(0)
            continue
        draft = states.draft_tokens[row, :length].tolist()
        assert all(0 <= token < self.vocab_size for token in draft)  # Their embeddings are looked up.
        if total == int(states.prefill_len.np[row]):  # Padding of the scheduler.
            draft = []
        produced = verified(text, draft)
        sampled[at, : len(produced)] = torch.tensor(produced)
        counts.append(len(produced))
        rejected.append(length + 1 - len(produced))
    result = SimpleNamespace(sampled_token_ids=sampled)
    return result, torch.tensor(counts), torch.tensor(rejected)


def post_update(
    rows, computed, last, _, sampled, counts, rejected, starts, texts, totals, drafts=None, drafts_out=None
):
    """Write what a step produced into the state of requests: the host's kernel of the same name."""
    for at, (row, count) in enumerate(zip(rows.tolist(), counts.tolist(), strict=True)):
        computed[row] += int(starts[at + 1] - starts[at] - rejected[at])
        if count:
            texts[row, totals[row] : totals[row] + count] = sampled[at, :count].to(texts.dtype)
            totals[row] += count
            last[row] = sampled[at, count - 1]


def apply_write(self):
    """Write staged values: the host's method of the same name."""
    begin = 0
    for row, start, end in zip(
        self._staged_write_indices, self._staged_write_starts, self._staged_write_cu_lens, strict=True
    ):
        values = torch.tensor(self._staged_write_contents[begin:end], dtype=self.dtype)
        if self.gpu.dim() == 1:
            self.gpu[row] = values[0]
        else:
            self.gpu[row, start : start + len(values)] = values
        begin = end
    self.clear_staged_writes()


class Output:
    """The output of a step, which the host copies from the device."""

    def __init__(self, model_runner_output, sampler_output, num_sampled_tokens, **_):
        rows = zip(sampler_output.sampled_token_ids.tolist(), num_sampled_tokens.tolist(), strict=True)
        model_runner_output.sampled_token_ids = [row[:count] for row, count in rows]
        self.output = model_runner_output

    def get_output(self):
        return self.output
