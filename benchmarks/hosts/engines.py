"""The hosts, with the drafts of each method. Each is imported in the process that runs it."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

from benchmarks.hosts.llama import LLAMA_HOSTS, LLAMA_METHODS
from benchmarks.hosts.runs import FOLDER, MAX_DRAFT, OWN, Run, RunTask, Task
from drafter_service.observability.measuring.rounds import Timer

VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
VLLM_FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {
        "speculative_config": {
            "method": "ngram",
            "num_speculative_tokens": MAX_DRAFT,
            "prompt_lookup_max": 4,
            "prompt_lookup_min": 2,
        }
    },
    "empty": {
        "speculative_config": {
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": MAX_DRAFT,
        }
    },
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": MAX_DRAFT}},
    OWN: {
        "scheduler_cls": "drafter_service.plugins.vllm.Scheduler",
        "speculative_config": {
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": MAX_DRAFT,
        },
    },
}
METHODS = {"vllm": tuple(VLLM_FLAGS), "transformers": ("none", "prompt-lookup", OWN), **LLAMA_METHODS}
ONE_AT_ONCE = ("prompt-lookup",)
"""Methods that do not run several requests at once."""


def open_vllm(method: str) -> RunTask:
    """Return a function that runs a task."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    core = LLM(
        str(FOLDER),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        max_num_seqs=128,
        disable_log_stats=True,
        **VLLM_FLAGS[method],
    ).llm_engine

    def run_task(task: Task) -> Run:
        run, outputs = Run(), dict[str, list[int]]()
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
                    run.request_steps += has_output
                    running[each.request_id] = len(each.outputs[0].token_ids)
                    if each.finished:
                        outputs[each.request_id] = list(each.outputs[0].token_ids)
                        del running[each.request_id]
        run.outputs = [outputs[str(at)] for at in range(len(task.prompts))]
        run.wall_s, run.cpu_s = timer.wall_s, timer.cpu_s
        return run

    return run_task


def open_transformers(method: str) -> RunTask:
    """Return a function that runs a task, in batches of as many rows as requests at once."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER, padding_side="left")
    tokenizer.pad_token = tokenizer.eos_token
    options: dict[str, Any] = {}
    if method == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": MAX_DRAFT}
    elif method == OWN:
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
            texts = [until(tokenizer.eos_token_id, row) for row in output[:, inputs.input_ids.shape[1] :].tolist()]
            # The first step of assisted decoding verifies a draft together with the prompt: it counts as others do.
            # Plain decoding runs finished rows as well, which are not counted.
            run.request_steps += min(sum(rows_run[1:]), sum(len(text) - 1 for text in texts))
            run.outputs += texts
        run.wall_s, run.cpu_s = timer.wall_s, timer.cpu_s
        return run

    return run_task


def until(end: int, tokens: list[int]) -> list[int]:
    """Return the tokens up to the first `end`."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def open_llama(host: str, method: str) -> RunTask:
    """Return a function that runs a task, one request at a time."""
    llama = LLAMA_HOSTS[host](FOLDER, method, MAX_DRAFT)

    def run_task(task: Task) -> Run:
        run, cpu = Run(), llama.cpu_seconds()
        with Timer() as timer:
            for prompt in task.prompts:
                output, steps = llama.complete(prompt, task.max_tokens, task.is_useless)
                run.outputs.append(output)
                run.request_steps += steps
        run.wall_s, run.cpu_s = timer.wall_s, llama.cpu_seconds() - cpu
        return run

    return run_task


OPENERS: dict[str, Callable[[str], RunTask]] = {
    "vllm": open_vllm,
    "transformers": open_transformers,
    **{name: partial(open_llama, name) for name in LLAMA_HOSTS},
}
