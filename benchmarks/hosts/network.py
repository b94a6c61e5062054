"""vLLM's own network, the corpus, and both together: tokens per step on prompts of which half were run before.

The figures depend on no other load: a step counts as long as its tokens and sequences make it.
"""

from __future__ import annotations

import json
import multiprocessing
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from functools import partial

from benchmarks.hosts.engines import Run, Task, open_method, run
from benchmarks.support import Row, say
from drafter_service.observability.measuring.sidecar import running_sidecar

DOUBLE_AT = 128
"""Number of tokens, or of sequences, at which a step takes twice as long as an empty one."""
LEARNING_S = 3.0
"""Time after which the corpus has learned what has finished, and has sent it to copies."""
OWN = "ssd"


def open_with_equal_steps(method: str, settings: str) -> None:
    """Load vLLM in this process. The durations of steps that the plug-in learns from depend on their tokens alone."""
    open_method("vllm", method, settings)
    from drafter_service.plugins.session import HostSession

    record = HostSession.record_step
    HostSession.record_step = lambda session, tokens, sequences, _: record(  # type: ignore[method-assign]
        session, tokens, sequences, 1 + (tokens + sequences) / DOUBLE_AT
    )


def compare_with_network(network: str, prompts: Sequence[str], concurrency: int, drafting: str) -> list[Row]:
    """Run every second prompt, then all of them; return a row for each half and method.

    drafting: where drafts are made: "embedded", "replica" or "sidecar".
    """
    context, runs = multiprocessing.get_context("spawn"), {}
    for method in ("none", OWN, network, f"{network}+{OWN}"):
        with nullcontext() if drafting == "embedded" else running_sidecar("--capacity", "1M") as sidecar:
            source = {"sidecar": "embedded"} if sidecar is None else {"sidecar": sidecar.address, "drafting": drafting}
            initializer = partial(open_with_equal_steps, method, json.dumps({"deadline_s": 0.5, **source}))
            with ProcessPoolExecutor(1, context, initializer=initializer) as pool:
                pool.submit(run, Task(prompts[::2], concurrency)).result()
                time.sleep(LEARNING_S)
                runs[method] = pool.submit(run, Task(prompts, concurrency)).result()
        say(f"{concurrency} at once, {method}: {runs[method].tokens_per_step:.3f} tokens per step")
    halves = {"repeated": slice(0, None, 2), "new": slice(1, None, 2), "all": slice(None)}
    return [
        {"concurrency": concurrency, "half": half, **row_of(method, runs, part)}
        for half, part in halves.items()
        for method in runs
    ]


def row_of(method: str, runs: dict[str, Run], part: slice) -> Row:
    """Return the figures of one method for a part of the prompts."""
    rates = {name: each.part(part).tokens_per_step for name, each in runs.items()}
    pairs = [*zip(runs[method].outputs[part], runs["none"].outputs[part], strict=True)]
    return {
        "method": method,
        "prompts": len(pairs),
        "identical": sum(one == other for one, other in pairs),
        "tokens_per_step": round(rates[method], 3),
        "over_better_alone": round(rates[method] / max(rate for name, rate in rates.items() if "+" not in name), 3),
    }
