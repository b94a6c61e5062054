"""The hosts, with the drafts of each method, and what is counted. Each is imported in the process that runs it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from benchmarks.hosts.llama import LLAMA_HOSTS, LLAMA_METHODS
from drafter_service.observability.measuring.rounds import Timer
from engine.models.shipped import SHIPPED_HEADS, SHIPPED_MODEL

MAX_TOKENS = 96
MAX_DRAFT, NETWORK_DRAFT = 16, 4
"""Largest number of draft tokens of a request in a step, and that of a host's own network."""
MAX_SEQUENCES = 128
OWN: dict[str, dict[str, Any]] = {
    "ssd": {"drafting": "sidecar"},
    "ssd-polling": {"drafting": "sidecar", "poll_s": 0.05},
    "ssd-replica": {"drafting": "replica"},
}
"""Methods with our plug-ins and a sidecar, and the settings of each."""
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
NULL_PROPOSER = {"method": "custom_class", "model": "drafter_service.plugins.vllm.NullProposer"}
VLLM_SPECULATION: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"method": "ngram", "prompt_lookup_max": 4, "prompt_lookup_min": 2},
    "empty": NULL_PROPOSER,
    "suffix": {"method": "suffix"},
    **dict.fromkeys(OWN, NULL_PROPOSER),
}
NETWORKS = ("draft_model", "eagle", "eagle3")
"""vLLM's methods with a network for the shipped model that drafts as many tokens as are wanted."""
METHODS = {"vllm": tuple(VLLM_SPECULATION), "transformers": ("none", "prompt-lookup", *OWN), **LLAMA_METHODS}
ONE_AT_ONCE = ("prompt-lookup",)
"""Methods that do not run several requests at once."""


class Task(NamedTuple):
    """What a method runs."""

    prompts: Sequence[str]
    concurrency: int
    """Number of requests at once."""
    max_tokens: int = MAX_TOKENS
    is_useless: bool = False
    """Whether outputs are random tokens."""


@dataclass
class Run:
    """Totals of some prompts."""

    outputs: list[list[int]] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    """Numbers of steps that decoded each prompt, or the prompts of each batch together."""
    cpu_s: float = 0.0
    plugin_cpu_s: float = 0.0
    """Seconds of `cpu_s` in the plug-in's code."""
    wall_s: float = 0.0

    @classmethod
    def total(cls, runs: Sequence[Run]) -> Run:
        """Return the sum of runs."""
        return cls(
            [output for run in runs for output in run.outputs],
            [steps for run in runs for steps in run.steps],
            sum(run.cpu_s for run in runs),
            sum(run.plugin_cpu_s for run in runs),
            sum(run.wall_s for run in runs),
        )

    @property
    def tokens_per_step(self) -> float:
        """Output tokens after the first of each prompt, per step of a request."""
        return sum(len(output) - 1 for output in self.outputs) / max(1, sum(self.steps))

    def part(self, prompts: slice) -> Run:
        """Return the outputs of some prompts, and their steps, if batches have one prompt."""
        return Run(self.outputs[prompts], self.steps[prompts])


RunTask = Callable[[Task], Run]
"""Runs a task in a host that is loaded."""


def open_vllm(method: str) -> RunTask:
    """Return a function that runs a task."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    options: dict[str, Any] = {}
    network, _, own = method.rpartition("+")
    if network or method in NETWORKS:
        options["speculative_config"] = network_options(network or method, MAX_DRAFT if network else NETWORK_DRAFT)
    elif method != "none":
        options["speculative_config"] = {**VLLM_SPECULATION[method], "num_speculative_tokens": MAX_DRAFT}
    if own in OWN:
        options["scheduler_cls"] = "drafter_service.plugins.vllm.Scheduler"
    core = LLM(
        str(SHIPPED_MODEL),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=MAX_SEQUENCES,
        disable_log_stats=True,
        **options,
    ).llm_engine

    def run_task(task: Task) -> Run:
        run, outputs = Run(steps=[0] * len(task.prompts)), dict[str, list[int]]()
        temperature = 2.0 if task.is_useless else 0.0
        sampling = SamplingParams(temperature=temperature, max_tokens=task.max_tokens, ignore_eos=task.is_useless)
        waiting, running = list(enumerate(task.prompts)), dict[str, int]()
        with Timer() as timer:
            while waiting or running:
                while waiting and len(running) < task.concurrency:
                    at, prompt = waiting.pop(0)
                    core.add_request(str(at), prompt, sampling)
                    running[str(at)] = 0
                for each in core.step():
                    has_output = len(each.outputs[0].token_ids) > running[each.request_id] > 0
                    run.steps[int(each.request_id)] += has_output
                    running[each.request_id] = len(each.outputs[0].token_ids)
                    if each.finished:
                        outputs[each.request_id] = list(each.outputs[0].token_ids)
                        del running[each.request_id]
        run.outputs = [outputs[str(at)] for at in range(len(task.prompts))]
        run.wall_s, run.cpu_s = timer.wall_s, timer.cpu_s
        return run

    return run_task


def network_options(method: str, max_draft: int) -> dict[str, Any]:
    """Return vLLM's options for a network of the shipped model that drafts `NETWORK_DRAFT` tokens."""
    options = {
        "method": method,
        "model": str(SHIPPED_HEADS / method.replace("_", "-")),
        "num_speculative_tokens": max_draft,
    }
    if max_draft > NETWORK_DRAFT:
        options["num_speculative_tokens_per_batch_size"] = [(1, MAX_SEQUENCES, NETWORK_DRAFT)]
    return options


def open_transformers(method: str) -> RunTask:
    """Return a function that runs a task, in batches of as many rows as requests at once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(SHIPPED_MODEL, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(SHIPPED_MODEL, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    options: dict[str, Any] = {}
    if method == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": MAX_DRAFT}
    elif method in OWN:
        from drafter_service.plugins.transformers import SsdGenerate

        options = {"custom_generate": SsdGenerate(model, max_draft=MAX_DRAFT)}
    rows_run: list[int] = []
    model.register_forward_pre_hook(lambda _, __, inputs: rows_run.append(len(inputs["input_ids"])), with_kwargs=True)

    def run_task(task: Task) -> Run:
        run, timer = Run(), Timer()
        random = {"do_sample": True, "temperature": 2.0, "min_new_tokens": task.max_tokens}
        sampling = random if task.is_useless else {"do_sample": False}
        for first in range(0, len(task.prompts), task.concurrency):
            inputs = tokenizer(task.prompts[first : first + task.concurrency], return_tensors="pt", padding=True)
            rows_run.clear()
            with timer:
                output = model.generate(
                    **inputs,
                    max_new_tokens=task.max_tokens,
                    pad_token_id=tokenizer.pad_token_id,
                    **sampling,
                    **options,
                )
            end, rows = tokenizer.eos_token_id, output[:, inputs.input_ids.shape[1] :].tolist()
            texts = [row[: row.index(end) + 1] if end in row else row for row in rows]
            # The first step of assisted decoding verifies a draft together with the prompt: it counts as others do.
            # Plain decoding runs finished rows as well, which are not counted.
            run.steps.append(min(sum(rows_run[1:]), sum(len(text) - 1 for text in texts)))
            run.outputs += texts
        run.wall_s, run.cpu_s = timer.wall_s, timer.cpu_s
        return run

    return run_task


def open_llama(host: str, method: str) -> RunTask:
    """Return a function that runs a task, one request at a time."""
    complete, cpu_seconds = LLAMA_HOSTS[host](method, MAX_DRAFT)

    def run_task(task: Task) -> Run:
        run, began = Run(), cpu_seconds()
        with Timer() as timer:
            for prompt in task.prompts:
                output, steps = complete(prompt, task.max_tokens, task.is_useless)
                run.outputs.append(output)
                run.steps.append(steps)
        run.wall_s, run.cpu_s = timer.wall_s, cpu_seconds() - began
        return run

    return run_task


OPENERS: dict[str, Callable[[str], RunTask]] = {
    "vllm": open_vllm,
    "transformers": open_transformers,
    **{name: partial(open_llama, name) for name in LLAMA_HOSTS},
}


# --- In the process of a method

_run_task: RunTask
_plugin_s: list[float] = []
"""Processor time of each call of the plug-in."""


def open_method(host: str, method: str, settings: str) -> None:
    """Load a host in this process, and measure the processor time of the plug-in, all of which runs in a `Guard`.

    settings: those of the plug-in, see `PluginSettings`.
    """
    global _run_task
    os.environ["SSD_PLUGIN"] = settings
    _run_task = OPENERS[host](method)
    # After vLLM, which must be imported before Numba.
    from drafter_service.plugins.session import Guard

    enter, leave, depth, began = Guard.__enter__, Guard.__exit__, 0, 0.0

    def measured_enter(guard: Guard) -> None:
        nonlocal depth, began
        enter(guard)
        depth += 1
        if depth == 1:
            began = time.thread_time()

    def measured_leave(guard: Guard, *problem: Any) -> bool:
        nonlocal depth
        depth -= 1
        if depth == 0:
            _plugin_s.append(time.thread_time() - began)
        return leave(guard, *problem)

    Guard.__enter__, Guard.__exit__ = measured_enter, measured_leave  # type: ignore[method-assign]


def run(task: Task) -> Run:
    """Run a task in this process."""
    _plugin_s.clear()
    done = _run_task(task)
    done.plugin_cpu_s = sum(_plugin_s, 0.0)
    return done
