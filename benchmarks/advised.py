"""Compare what `ssd-drafter advise` predicts with what was measured on a GPU.

    python -m benchmarks.advised --trace build/traces/agent-tau-airline-gpt4o.npz [--results FILE]

Replays the requests that part `replay` of `benchmarks.gpu` served, on the steps of the GPU's data sheet, and prints the
speed-up that `advise` predicts, with and without the wait for the host, beside the measured one. FILE is that of
`benchmarks.gpu`; the trace is the one that it was given.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.support.command import RESULTS, new_parser, print_document
from benchmarks.traces import Trace, load_trace
from drafter_service.observability.pages.tables import console_table

LONGEST_PROMPT = 5_000
"""Requests with longer prompts are not served, see `benchmarks.gpu.bench`."""
MAX_DRAFT = 16


def main(arguments: Sequence[str] | None = None) -> None:
    """Predict each measured speed-up, and print both."""
    parser = new_parser("advised", __doc__)
    add = parser.add_argument
    add("--trace", type=Path, required=True, metavar="FILE", help="recorded traffic, .npz")
    add("--results", type=Path, default=RESULTS / "gpu-2026-11-26.json", metavar="FILE", help="of `benchmarks.gpu`")
    add("--model-size", default="8b", help="size of the model that was served (8b)")
    options = parser.parse_args(arguments)
    document = json.loads(options.results.read_text())
    try:
        trace = load_trace(options.trace)
    except ValueError as error:
        parser.error(str(error))
    gpu = document["gpu"].split()[-1].lower()
    [part] = [part for part in document["parts"] if part["name"] == "replay"]
    measured = {int(figure["name"].split()[3]): figure for figure in part["figures"]}
    rows = [predicted(trace, gpu, options.model_size, count, figure) for count, figure in measured.items()]
    heads = ("at once", "tokens per step", "host, ms a step", "without host", "predicted", "measured")
    console_rows = [tuple(f"{value:.2f}" if isinstance(value, float) else str(value) for value in row) for row in rows]
    Console().print(console_table(heads, console_rows, title=f"ssd by none, {options.model_size} on {document['gpu']}"))
    print_document({"results": [dict(zip(heads, row, strict=True)) for row in rows]})


def predicted(
    trace: Trace, gpu: str, model_size: str, concurrency: int, figure: Mapping[str, Any]
) -> tuple[int, float, float, float, float, float]:
    """Return a row of the table for a figure of part `replay`."""
    # The kernels take seconds to import.
    from drafter_service.commands.advise.replay import replay
    from drafter_service.commands.advise.trials import TracedDrafter, curve_at, host_ms
    from ssd import Corpus, SuffixDrafter
    from ssd.budget.roofline import roofline
    from ssd.config import DrafterConfig

    details, profile = figure["details"], roofline(gpu, model_size)
    short = [request for request in trace.requests if len(request.prompt) <= LONGEST_PROMPT]
    seen = details["seen_before"]
    traffic = Trace(trace.name, short[seen : seen + details["requests"]]).traffic()
    prompts_s = traffic.uncached_prompt_tokens() * profile.prompt_token_ms / 1e3
    if not details["turns_wait_for_each_other"]:
        traffic = replace(traffic, sessions=np.full(len(traffic), -1))
    curve, config = curve_at(profile, concurrency), DrafterConfig(max_draft=MAX_DRAFT)
    drafter = SuffixDrafter(config, corpus=Corpus.from_config(config), curve=curve)
    for number, request in enumerate(short[:seen], len(traffic)):
        drafter.start(number, request.prompt)
        drafter.finish(number, request.output)
    timed = TracedDrafter(drafter, None)
    result = replay(traffic, timed, curve, concurrency=concurrency, max_draft=MAX_DRAFT)
    plain_s = int(traffic.output_lengths.sum()) * profile.step(concurrency, concurrency) / 1e3 / concurrency
    drafted_s, wait_ms = result.seconds + timed.draft_s, host_ms(concurrency)
    wait_s = int(result.steps.sum()) / concurrency * wait_ms / 1e3
    return (
        concurrency,
        result.tokens_per_step,
        wait_ms,
        (plain_s + prompts_s) / (drafted_s - wait_s + prompts_s),
        (plain_s + prompts_s) / (drafted_s + prompts_s),
        float(figure["value"]),
    )


if __name__ == "__main__":
    main()
