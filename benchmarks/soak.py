"""Run the cluster under constant mixed load for a long time: `python -m benchmarks.soak [--minutes 60]`.

Two engines, two sidecars, Redis and a router serve requests at a fixed rate, well below what the machine can do.
Meanwhile clients come and go at both sidecars; texts are observed and forgotten; namespaces are created, saved and
dropped; reports and metrics are read. The corpora and the log in Redis are small and full from the start. Warm-up and
comparison need some minutes each, so a run of less than half an hour says little.

The first sixth of the run is a warm-up. The second sixth is compared with the last one: memory must not grow by more
than 2 %, no thread, descriptor or file may be left over, and the 99th percentile of request latency may rise by 10 % at
most. The page soak.html and the document soak.json are written to --out; the document is also the last line of the
output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.cluster.options import add_engine_options, settings_of
from benchmarks.support.command import new_parser

CAPACITY = 200_000
"""Tokens of each namespace, so that the ring buffers are full after seconds."""
LOG_TOKENS = 400_000
RATE = 3.0
"""Requests per second: with everything else, about a third of two cores."""
SAMPLE_S = 5.0
MIN_MINUTES = 2.0
"""Shortest run of which each sixth has several samples."""


def soak(options: argparse.Namespace, log: Callable[[str], None]) -> dict[str, object]:
    """Run the load and return the document; `log` gets progress messages."""
    from contextlib import ExitStack
    from itertools import cycle

    from benchmarks.cluster.administration import administered, fill
    from benchmarks.cluster.learned import namespace_name
    from benchmarks.cluster.observation import Observations
    from benchmarks.cluster.topology import running_cluster
    from benchmarks.cluster.traffic import Traffic, mixed_prompts
    from benchmarks.support.sidecar_load import NAMESPACE

    environment = {"SSD_DRAFTER_LOG__MAX_TOKENS": str(LOG_TOKENS)}
    settings = settings_of(options, capacity=CAPACITY, sidecar_environment=environment)
    seconds = options.minutes * 60
    log("starting")
    with running_cluster(2, settings) as cluster, ExitStack() as stack:
        for node in cluster.nodes:
            for namespace in (NAMESPACE, namespace_name()):
                fill(node, namespace)
        traffic = Traffic(cluster.router_port, RATE)
        observations = Observations(cluster)
        stack.enter_context(traffic.running(cycle(mixed_prompts())))
        loads = [stack.enter_context(administered(node)) for node in cluster.nodes]
        began = time.monotonic()
        while (passed := time.monotonic() - began) < seconds:
            time.sleep(SAMPLE_S)
            observations.sample()
            if len(observations.samples) % 12 == 0:
                errors = len(traffic.failures) + sum(len(load.errors) for load in loads)
                log(f"{passed:.0f} of {seconds:.0f} s: {len(traffic.records)} requests, {errors} errors")
        ended = time.monotonic()
    errors = traffic.failures + [error for load in loads for error in load.errors]
    return observations.document(settings.engine, began, ended, traffic.records, errors)


def main() -> None:
    """Run the load and print the results."""
    parser = new_parser("soak", __doc__)
    add_engine_options(parser)
    parser.add_argument("--minutes", type=float, default=60.0, help=f"{MIN_MINUTES:g} at least (60)")
    parser.add_argument("--out", type=Path, default=Path("build/soak"), help="folder for results and logs")
    options = parser.parse_args()
    if options.minutes < MIN_MINUTES:
        parser.error(f"--minutes must be at least {MIN_MINUTES:g}")

    from benchmarks.cluster.soak_page import render_page
    from benchmarks.support.targets import conclude
    from ssd.errors import UserError

    options.out.mkdir(parents=True, exist_ok=True)
    try:
        document = soak(options, lambda text: print(text, file=sys.stderr, flush=True))
    except UserError as problem:
        raise SystemExit(str(problem)) from None
    conclude("soak", document, render_page(document), options.out)


if __name__ == "__main__":
    main()
