"""llama.cpp in `benchmarks.hosts`, one request at a time: llama-cpp-python, and its own server for comparison.

llama-cpp-python needs the package gguf as well. The server is the command `llama-server`, of llama.cpp's own build.
"""

from __future__ import annotations

import json
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.util import Finalize
from pathlib import Path
from typing import Any, Protocol
from urllib.error import URLError
from urllib.request import Request, urlopen

from benchmarks.support.resources import cpu_seconds

CONTEXT = 1024
START_S = 60.0
LOOKUPS = (2, 4, 6, 8, 10)
"""Draft tokens of llama-cpp-python's prompt lookup; 10 is its default."""
PYTHON_METHODS = ("none", *(f"prompt-lookup-{length}" for length in LOOKUPS), "ssd-embedded", "ssd")
SERVER_FLAGS = {
    "none": "",
    "ngram-cache": "",
    "ngram-simple": "",
    "ngram-simple-3-8": "--spec-ngram-simple-size-n 3 --spec-ngram-simple-size-m 8",
    "ngram-map-k": "",
    "ngram-map-k-3-8": "--spec-ngram-map-k-size-n 3 --spec-ngram-map-k-size-m 8",
    "ngram-map-k4v": "",
    "ngram-map-k4v-4-8": "--spec-ngram-map-k4v-size-n 4 --spec-ngram-map-k4v-size-m 8",
    "ngram-mod": "",
    "ngram-mod-4-2-8": "--spec-ngram-mod-n-match 4 --spec-ngram-mod-n-min 2 --spec-ngram-mod-n-max 8",
}
"""llama.cpp's own drafters (`--spec-type`) with their defaults, and with the best of several lengths for 20 other
prompts."""


class LlamaHost(Protocol):
    """One way to run the shipped model in llama.cpp."""

    def complete(self, prompt: str, max_tokens: int, is_useless: bool) -> tuple[list[int], int]:
        """Return the output, and the number of steps after that of its first token."""

    def cpu_seconds(self) -> float:
        """Return the CPU time of the host so far."""


@contextmanager
def model_file(folder: Path) -> Iterator[Path]:
    """Write a model folder as GGUF; the file may be removed once it was loaded."""
    from benchmarks.support.gguf_model import write_gguf

    with tempfile.TemporaryDirectory(prefix="ssd-") as place:
        file = Path(place, f"{folder.name}.gguf")
        write_gguf(folder, file)
        yield file


class PythonHost:
    """llama-cpp-python, in one thread."""

    def __init__(self, folder: Path, method: str, max_draft: int) -> None:
        from llama_cpp import Llama
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        from drafter_service.plugins.llama_cpp import SsdDraftModel

        with model_file(folder) as file:
            options = {"n_ctx": CONTEXT, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
            self._llama = llama = Llama(str(file), logits_all=method != "none", **options)
        if method.startswith("prompt-lookup"):
            llama.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=int(method.removeprefix("prompt-lookup-")))
        elif method != "none":
            settings = {"sidecar": "embedded"} if method == "ssd-embedded" else {}
            llama.draft_model = SsdDraftModel(llama, max_draft=max_draft, **settings)
        self._steps = 0
        self._output: list[int] = []
        self._generate, self._eval = llama.generate, llama.eval
        llama.generate, llama.eval = self._generate_and_keep, self._count_and_eval

    def complete(self, prompt: str, max_tokens: int, is_useless: bool) -> tuple[list[int], int]:
        """Return the output, and the number of steps after that of its first token."""
        self._steps, self._output = 0, []
        random = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": len(prompt)}
        self._llama(prompt, max_tokens=max_tokens, **(random if is_useless else {"temperature": 0.0}))
        return self._output, self._steps - 1

    def cpu_seconds(self) -> float:
        """Return the CPU time of this process."""
        return time.process_time()

    def _generate_and_keep(self, *arguments: Any, **named: Any) -> Iterator[int]:
        for token in self._generate(*arguments, **named):
            self._output.append(token)
            yield token

    def _count_and_eval(self, tokens: list[int]) -> None:
        self._steps += 1
        self._eval(tokens)


class ServerHost:
    """llama.cpp's server, in one thread of its own process."""

    def __init__(self, folder: Path, method: str, max_draft: int) -> None:  # noqa: ARG002
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        with model_file(folder) as file:
            command = ["llama-server", "--model", str(file), "--port", str(port), "--ctx-size", str(CONTEXT)]
            # Unlike the server, llama-cpp-python keeps no prompts of earlier requests by default.
            command += ["--parallel", "1", "--threads", "1", "--threads-batch", "1", "--no-ui", "--cache-ram", "0"]
            command += ["--spec-type", method.rstrip("-0123456789"), *SERVER_FLAGS[method].split()]
            self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            Finalize(None, self._process.kill, exitpriority=1)  # at the end of this process
            self._await_start()

    def complete(self, prompt: str, max_tokens: int, is_useless: bool) -> tuple[list[int], int]:
        """Return the output, and the number of steps after that of its first token."""
        body: dict[str, Any] = {"prompt": prompt, "n_predict": max_tokens, "temperature": 0.0, "return_tokens": True}
        if is_useless:
            body |= {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": len(prompt)}
        content = {"Content-Type": "application/json"}
        with urlopen(Request(f"{self._url}/completion", json.dumps(body).encode(), content)) as response:
            answer = json.loads(response.read())
        tokens = answer["tokens"]
        return tokens, len(tokens) - 1 - answer["timings"].get("draft_n_accepted", 0)

    def cpu_seconds(self) -> float:
        """Return the CPU time of the server."""
        return cpu_seconds(self._process.pid)

    def _await_start(self) -> None:
        until = time.monotonic() + START_S
        while time.monotonic() < until and self._process.poll() is None:
            try:
                urlopen(f"{self._url}/health").close()
                return
            except (OSError, URLError):
                time.sleep(0.1)
        self._process.kill()
        raise SystemExit("llama-server did not start")


LLAMA_HOSTS: dict[str, Callable[[Path, str, int], LlamaHost]] = {"llama-cpp": PythonHost, "llama-server": ServerHost}
LLAMA_METHODS = {"llama-cpp": PYTHON_METHODS, "llama-server": tuple(SERVER_FLAGS)}
