"""vLLM's OpenAI server as a process of its own, with and without the plug-in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

from tests.redis import free_port

ROOT = Path(__file__).parents[2]
MODEL = ROOT / "engine" / "models" / "assets" / "stdlib-7m"
START_TIMEOUT_S = 600
DEADLINE_S = 0.5
DRAFT_TOKENS = 8
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
FLAGS = ("--served-model-name", "base", "--dtype", "float32", "--enforce-eager", "--max-model-len", "1024")
DRAFT_FLAGS = (  # Those of docs/hosts/vllm.md.
    "--scheduler-cls",
    "drafter_service.plugins.vllm.Scheduler",
    "--speculative-config",
    json.dumps(
        {
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": DRAFT_TOKENS,
        }
    ),
)


class VllmServer:
    """A running server."""

    def __init__(self, process: subprocess.Popen[bytes], port: int, log: Path) -> None:
        self.process = process
        self.address = f"http://127.0.0.1:{port}"
        self._log = log

    def await_ready(self) -> None:
        """Return once the server accepts requests. Raises AssertionError with its log if it does not start."""
        until = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < until and self.process.poll() is None:
            try:
                with urlopen(f"{self.address}/health"):
                    return
            except (URLError, ConnectionError):
                time.sleep(0.2)
        raise AssertionError(self._log.read_text()[-5000:])

    def warnings(self) -> list[str]:
        """Return the plug-in's warnings in the log so far, without what precedes its prefix."""
        lines = (line for line in self._log.read_text().splitlines() if "WARNING" in line)
        return [line[line.index("ssd-drafter:") :] for line in lines if "ssd-drafter:" in line]

    def metrics(self, name: str) -> list[float]:
        """Return a metric of vLLM for each of its engines; name: without the prefix."""
        with urlopen(f"{self.address}/metrics") as response:
            lines = response.read().decode().splitlines()
        return [float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{")]


@contextmanager
def vllm_server(folder: Path, *flags: str, sidecar: str = "", drafting: str = "sidecar", **environment: str):
    """Start a server whose log is in a folder; yield it before it is ready.

    sidecar: its address; "": no drafts. drafting: a setting of the plug-in.
    """
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--port", str(port), "--model", str(MODEL)]
    plugin = {"sidecar": sidecar, "drafting": drafting, "deadline_s": DEADLINE_S}
    settings = {"SSD_PLUGIN": json.dumps(plugin)} if sidecar else {}
    log = folder / f"vllm-{port}.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [*command, *FLAGS, *(DRAFT_FLAGS if sidecar else ()), *flags],
            cwd=ROOT,
            env={**os.environ, **ENVIRONMENT, **settings, **environment},
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        yield VllmServer(process, port, log)
    except Exception as problem:
        problem.add_note(f"{log}, state {process.poll()}:\n{log.read_text()[-5000:]}")
        raise
    finally:
        process.terminate()
        try:
            process.wait(timeout=60)
        finally:  # Its engines and workers outlive a server that is killed, or that has not started.
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
