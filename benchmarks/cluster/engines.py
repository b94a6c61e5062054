"""The engines of the cluster: their commands, and the totals that they count."""

from __future__ import annotations

import http.client
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NamedTuple
from urllib.request import urlopen

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "engine" / "models" / "assets" / "stdlib-7m"
NAME = MODEL.name
MAX_DRAFT = 16
DEADLINE_S = 0.25
"""Longest time that a step of vLLM waits for a draft: long, so that a stalled machine causes a slow step and not a
missing draft. The engine of this project waits 10 ms (engine/drafters/kinds.py).
"""
MAX_SEQUENCES = 32
PAGE_TIMEOUT_S = 2.0
NO_ANSWER = (OSError, http.client.HTTPException)
"""Errors of a request without a complete response: an engine that is killed may end it at any byte."""
COUNTERS = ("vllm:generation_tokens_total", "vllm:spec_decode_num_accepted_tokens_total")
"""Both engines have these names."""

EngineKind = Literal["ssd", "vllm"]


class Totals(NamedTuple):
    """Counts of an engine since it started, or during a period."""

    tokens: float
    """Output tokens."""
    accepted: float
    """Draft tokens that were accepted."""

    def since(self, earlier: Totals) -> Totals:
        """Return what was counted after `earlier`; everything, if the engine has started again in between."""
        if self.tokens < earlier.tokens:
            return self
        return Totals(*(now - then for now, then in zip(self, earlier, strict=True)))


NOTHING = Totals(0, 0)


def sum_of(parts: Sequence[Totals]) -> Totals:
    """Return the sum of totals."""
    return Totals(*map(sum, zip(NOTHING, *parts, strict=True)))


def tokens_per_step(totals: Totals) -> float | None:
    """Return output tokens per step of a request, where each step gives one token more than were accepted; None if
    there were none.
    """
    steps = totals.tokens - totals.accepted
    return totals.tokens / steps if steps > 0 else None


def command(kind: EngineKind, python: Path, port: int, sidecar: str) -> tuple[list[str], dict[str, str]]:
    """Return the command of an engine that drafts with a sidecar, and variables of its environment."""
    environment = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "passive"}
    if kind == "ssd":
        arguments = ["-m", "engine.commands.main", "serve", "--port", str(port), "--threads", "1"]
        arguments += ["--drafter", "ssd-remote", "--address", sidecar, "--max-draft", str(MAX_DRAFT)]
        arguments += ["--max-sequences", str(MAX_SEQUENCES), "--kv-memory", "128"]
        return [sys.executable, *arguments], environment
    speculation = {
        "method": "custom_class",
        "model": "drafter_service.plugins.vllm.NullProposer",
        "num_speculative_tokens": MAX_DRAFT,
    }
    arguments = ["-m", "vllm.entrypoints.openai.api_server", "--model", str(MODEL), "--served-model-name", NAME]
    arguments += ["--port", str(port), "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024"]
    arguments += ["--max-num-seqs", str(MAX_SEQUENCES), "--disable-uvicorn-access-log"]
    arguments += ["--scheduler-cls", "drafter_service.plugins.vllm.Scheduler"]
    arguments += ["--speculative-config", json.dumps(speculation)]
    environment |= {
        "SSD_PLUGIN": json.dumps({"sidecar": sidecar, "deadline_s": DEADLINE_S}),
        "VLLM_CPU_KVCACHE_SPACE": "1",
        # Otherwise all engines of a machine choose the same core.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        # vLLM starts commands of its environment.
        "PATH": f"{python.parent}:{os.environ['PATH']}",
    }
    # The workers of vLLM spin while they wait. The last core is left to the other processes.
    cores = f"0-{max(0, (os.cpu_count() or 1) - 2)}"
    return ["taskset", "--cpu-list", cores, str(python), *arguments], environment


def read_totals(port: int) -> Totals | None:
    """Return the totals of the engine at a port; None if it does not answer."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PAGE_TIMEOUT_S) as answer:
            page = answer.read().decode()
    except NO_ANSWER:
        return None
    return Totals(*(_counter(page, name) for name in COUNTERS))


def is_ready(port: int) -> bool:
    """Return whether the engine at a port serves."""
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=PAGE_TIMEOUT_S) as answer:
            return answer.status == 200
    except NO_ANSWER:
        return False


def _counter(page: str, name: str) -> float:
    """Return the sum over the labels of a counter."""
    return sum(map(float, re.findall(rf"^{re.escape(name)}{{[^}}]*}} (\S+)", page, re.MULTILINE)))
