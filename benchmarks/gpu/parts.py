"""The parts of the benchmark, each of which runs in a process of its own with a time limit.

A part that exceeds its time or memory, or makes an illegal memory access, does not affect other parts.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

from benchmarks.gpu.bench import Bench, Figure, Setting, SkippedError
from benchmarks.gpu.serving_parts import drafting, rejected, replay
from benchmarks.gpu.step_parts import ceilings, decode, start, streams, trees, verify
from ssd.errors import UserError


@dataclass(frozen=True)
class Part:
    """A question that the benchmark answers, and the function that measures it."""

    name: str
    title: str
    limit_s: int
    """Time limit, extended by the time that earlier parts did not use; figures reported before it are kept."""
    run: Callable[[Bench], Iterator[Figure]]


PARTS = (
    Part("ceilings", "copy bandwidth and matrix products", 20, ceilings),
    Part("start", "capturing CUDA graphs for the most streams that are served", 30, start),
    Part("decode", "plain decoding of one stream, against the bandwidth; GPU idle between steps", 30, decode),
    Part("verify", "verifying 16 draft tokens, against a plain step", 35, verify),
    Part("trees", "a tree of 32 nodes at 32k tokens, against a path", 45, trees),
    Part("replay", "ssd against none on recorded traffic", 90, replay),
    Part("rejected", "drafts that are always rejected, against none", 40, rejected),
    Part("drafting", "CPU drafting on the GPU's timeline, embedded and remote", 40, drafting),
    Part("streams", "64 streams without drafts, against the estimate", 25, streams),
)
"""Parts in the order in which they run: 355 seconds in total, 9 minutes with the tests that need a GPU."""


def run_part(part: Part, setting: Setting, limit_s: float) -> dict[str, Any]:
    """Run a part; return its figures and how it ended: `ok`, `skipped`, `failed` or `out of time`."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=measure, args=(part, setting, theirs))
    began = perf_counter()
    process.start()
    theirs.close()
    figures, status, reason = [], "", ""
    try:
        while not status:
            if not ours.poll(max(0.0, began + limit_s - perf_counter())):
                status, reason = "out of time", f"stopped after {limit_s:.0f} s"
                break
            kind, value = ours.recv()
            if kind == "figure":
                figures.append(value)
            else:
                status, reason = kind, value
    except EOFError:
        process.join()
        status, reason = "failed", f"exit code {process.exitcode}"
    finally:
        process.kill()
        with suppress(ProcessLookupError):
            os.killpg(process.pid or 0, signal.SIGKILL)
        process.join()
    return {
        "name": part.name,
        "title": part.title,
        "limit_s": limit_s,
        "seconds": round(perf_counter() - began, 1),
        "status": status,
        "reason": reason,
        "figures": figures,
    }


def measure(part: Part, setting: Setting, results: Connection) -> None:
    """Run a part in this process, and send each figure, and then how the part ended."""
    os.setpgid(0, 0)  # a separate process group, so that a sidecar is killed as well
    try:
        for figure in part.run(Bench(setting)):
            results.send(("figure", figure.as_row()))
        results.send(("ok", ""))
    except (SkippedError, UserError) as problem:
        results.send(("skipped", str(problem)))
    except Exception as problem:
        traceback.print_exc()
        results.send(("failed", "".join(traceback.format_exception_only(problem)).strip()))
