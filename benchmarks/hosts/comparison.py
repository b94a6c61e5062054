"""Run the methods of a host in alternation: each in a process of its own, beside one sidecar."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

from benchmarks.hosts.engines import OPENERS, OWN, Run, RunTask, Task
from benchmarks.support.resources import cpu_seconds
from drafter_service.observability.measuring.rounds import alternated, columns
from drafter_service.observability.measuring.sidecar import running_sidecar

PASSES = 2
Row = dict[str, Any]


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


_run_task: RunTask
_timer: PluginTimer
"""Of this process, which runs a method."""


def open_method(host: str, method: str) -> None:
    """Load a host in this process."""
    global _run_task, _timer
    _run_task, _timer = OPENERS[host](method), PluginTimer()


def run(task: Task) -> Run:
    """Run a task in this process."""
    _timer.take()
    done = _run_task(task)
    done.plugin_cpu_s = _timer.take()
    return done


@contextmanager
def method_processes(host: str, methods: Sequence[str]) -> Iterator[dict[str, Callable[[Task], Run]]]:
    """Run a process for each method; yield functions that run a task there."""
    context, cases = multiprocessing.get_context("spawn"), {}
    with ExitStack() as stack:
        for method in methods:
            pool = ProcessPoolExecutor(1, context, initializer=open_method, initargs=(host, method))
            stack.enter_context(pool)
            cases[method] = lambda task, pool=pool: pool.submit(run, task).result()
            cases[method](Task(["def warm_up():"], 1, 4))
        yield cases


def compare(host: str, methods: Sequence[str], tasks: Sequence[Task]) -> list[Row]:
    """Run the tasks twice, from an empty corpus on; return a row for each pass and method."""
    rows = []
    with running_sidecar("--capacity", "1M") as sidecar:
        os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": sidecar.address, "deadline_s": 0.05})
        with method_processes(host, methods) as cases:
            for number in range(1, PASSES + 1):
                began = cpu_seconds(sidecar.pid)
                runs = {name: Run.total(own) for name, own in columns(alternated(cases, tasks)).items()}
                sidecar_s = cpu_seconds(sidecar.pid) - began
                shared = {"concurrency": tasks[0].concurrency, "pass": number}
                rows += [{**shared, **row_of(method, runs, sidecar_s)} for method in methods]
    return rows


def row_of(method: str, runs: dict[str, Run], sidecar_s: float) -> Row:
    """Return the figures of one method in one pass."""
    run = runs[method]
    own_s = sidecar_s if method == OWN else 0.0
    others = [each.cpu_s for name, each in runs.items() if not name.startswith(OWN) and name != "empty"]
    return {
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
