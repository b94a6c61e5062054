"""One case of the benchmark in vLLM on a device that answers at once, for the interpreter of build/hosts.

The engine core, scheduler and V1 model runner of vLLM for CPUs run unchanged, with one random layer. Only the forward
pass and the choice of tokens are replaced: a step yields the recorded outputs. vLLM must start before Numba is
imported.
"""

from __future__ import annotations

import argparse
import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import cycle
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from vllm import SamplingParams
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.core import EngineCore
from vllm.v1.executor.abstract import Executor
from vllm.v1.outputs import SamplerOutput
from vllm.v1.request import Request
from vllm.v1.sample.rejection_sampler import PLACEHOLDER_TOKEN_ID
from vllm.v1.spec_decode.metadata import SpecDecodeMetadata

from benchmarks.host_time import MAX_DRAFT, MAX_POSITIONS, STAGES, Device, Steps, recorded_items, step_tokens
from engine.models.shipped import SHIPPED_MODEL

if TYPE_CHECKING:
    from benchmarks.gpu.requests import Item

BLOCK_TOKENS = 32
"""Smallest block of vLLM's attention on CPUs."""


def run_case(method: str, at_once: int, options: argparse.Namespace) -> dict[str, float]:
    """Measure vLLM with a number of requests at once, and return the figures of `options.steps` steps.

    method: that of vLLM's speculation, or "none". options: those of the command line. Raises ValueError if an output is
    not the recorded one.
    """
    with np.load(options.trace) as trace:
        core = build(method, at_once, 1 + int(trace["tokens"].max()))
    learned, served, _ = recorded_items(options.trace)
    runner = core.model_executor.driver_worker.worker.model_runner
    if method == "suffix":
        learn(runner.drafter.suffix_cache, learned)
    device = Device()
    replace_model(runner, device, served)
    steps, seconds = Steps(device), timed_stages(core, runner)
    arrivals, running = enumerate(cycle(served)), dict[str, Request]()

    def add() -> None:
        number, item = next(arrivals)
        sampling = SamplingParams(temperature=0.0, max_tokens=len(item.request.recorded), ignore_eos=True)
        prompt = item.request.prompt.tolist()
        running[str(number)] = Request(str(number), prompt, sampling, None, block_hasher=core.request_block_hasher)
        core.add_request(running[str(number)])

    for _ in range(at_once):
        add()
    while len(steps) < options.steps + options.steps // 4:
        seconds.clear()
        began, before = time.perf_counter(), device.seconds
        outputs, is_executed = core.step()
        core.post_step(is_executed)
        total = time.perf_counter() - began - (device.seconds - before)
        results = [each for output in outputs.values() for each in output.outputs if each.new_token_ids]
        committed = sum(len(each.new_token_ids) for each in results)
        steps.add(total, [seconds[stage] for stage in STAGES], committed, len(results))
        for name in (each.request_id for each in results if each.finish_reason is not None):
            if list(running.pop(name).output_token_ids) != served[int(name) % len(served)].request.recorded.tolist():
                raise ValueError(f"the output of request {name} is not the recorded one")
            add()
    return steps.figures(options.steps // 4, has_other=False)


def build(method: str, at_once: int, vocabulary: int) -> EngineCore:
    """Return an engine core whose model has one random layer."""
    speculation = {"method": method, "num_speculative_tokens": MAX_DRAFT}
    config = EngineArgs(
        str(SHIPPED_MODEL), load_format="dummy", skip_tokenizer_init=True, enforce_eager=True, block_size=BLOCK_TOKENS,
        max_model_len=MAX_POSITIONS, max_num_seqs=at_once, max_num_batched_tokens=step_tokens(at_once),
        speculative_config=None if method == "none" else speculation,
        hf_overrides={
            "vocab_size": vocabulary, "max_position_embeddings": MAX_POSITIONS, "num_hidden_layers": 1,
            "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 32,
        },
    ).create_engine_config()  # fmt: skip
    return EngineCore(config, Executor.get_class(config), log_stats=False)


def learn(cache: Any, items: Sequence[Item]) -> None:
    """Let the cache of the suffix drafter learn the outputs of requests."""
    for number, item in enumerate(items):
        cache.start_request(f"learned {number}", item.request.prompt.astype(np.int32))
        cache.add_active_response(f"learned {number}", item.request.recorded.tolist())
        cache.stop_request(f"learned {number}")


def replace_model(runner: Any, device: Device, items: Sequence[Item]) -> None:
    """Replace the forward pass and the choice of tokens by the recorded outputs of requests.

    The id of a request is the number of its arrival. Arrivals repeat the items in their order.
    """
    outputs = [item.request.recorded.tolist() for item in items]

    def forward(input_ids: torch.Tensor, **_: Any) -> torch.Tensor:
        with device.work(is_step=True):
            return torch.zeros(len(input_ids), 1)

    def sample(_logits: torch.Tensor, drafts: SpecDecodeMetadata | None) -> SamplerOutput:
        with device.work(is_step=False):
            batch = runner.input_batch
            ends = [0] * batch.num_reqs if drafts is None else drafts.cu_num_draft_tokens.tolist()
            tokens = [] if drafts is None else drafts.draft_token_ids.tolist()
            width = 1 if drafts is None else 1 + drafts.max_spec_len
            rows = torch.full((batch.num_reqs, width), PLACEHOLDER_TOKEN_ID, dtype=torch.int32)
            for row, (name, begin, end) in enumerate(zip(batch.req_ids, [0, *ends], ends, strict=False)):
                produced = int(batch.num_tokens_no_spec[row] - batch.num_prompt_tokens[row])
                chosen = outcome(tokens[begin:end], outputs[int(name) % len(outputs)][produced:])
                rows[row, : len(chosen)] = torch.tensor(chosen, dtype=torch.int32)
        device.read()
        return SamplerOutput(rows, None)

    runner._model_forward, runner.model.compute_logits, runner._sample = forward, lambda hidden: hidden, sample


def outcome(draft: Sequence[int], follows: Sequence[int]) -> Sequence[int]:
    """Return the accepted tokens of a draft and one more, of the tokens that follow."""
    accepted = 0
    while accepted < min(len(draft), len(follows) - 1) and draft[accepted] == follows[accepted]:
        accepted += 1
    return follows[: accepted + 1]


def timed_stages(core: EngineCore, runner: Any) -> Counter[str]:
    """Return a counter to which the functions of each stage add their seconds.

    What steps do beside their stages is, for example, attention metadata and the runner's record of tokens.
    """
    seconds: Counter[str] = Counter()

    def timed(stage: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            began = time.perf_counter()
            result = function(*arguments, **named)
            seconds[stage] += time.perf_counter() - began
            return result

        return run

    for stage, owner, name in (
        ("schedule", core.scheduler, "schedule"),
        ("forward", runner, "_update_states"),
        ("forward", runner, "_prepare_inputs"),
        ("draft", getattr(runner, "drafter", None), "propose"),
        ("commit", core.scheduler, "update_from_output"),
    ):
        if owner is not None:
            setattr(owner, name, timed(stage, getattr(owner, name)))
    return seconds
