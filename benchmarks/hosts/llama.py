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
from typing import Any
from urllib.request import Request, urlopen

from benchmarks.support import cpu_seconds
from engine.models.shipped import SHIPPED_MODEL

CONTEXT = 1024
START_S = 60.0
RANDOM = {"temperature": 2.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
LOOKUPS = (2, 4, 6, 8, 10)
"""Draft tokens of llama-cpp-python's prompt lookup; 10 is its default."""
PYTHON_METHODS = (
    "none",
    *(f"prompt-lookup-{length}" for length in LOOKUPS),
    "ssd-embedded",
    "ssd",
    "ssd-polling",
    "ssd-replica",
)
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


Complete = Callable[[str, int, bool], tuple[list[int], int]]
"""Returns the output for a prompt, and the number of steps after that of its first token. Arguments: prompt, largest
number of tokens, and whether the output is random."""


@contextmanager
def model_file() -> Iterator[Path]:
    """Write the shipped model as GGUF; the file may be removed once it was loaded."""
    from benchmarks.support.gguf_model import write_gguf

    with tempfile.TemporaryDirectory(prefix="ssd-") as place:
        file = Path(place, f"{SHIPPED_MODEL.name}.gguf")
        write_gguf(SHIPPED_MODEL, file)
        yield file


def open_python(method: str, max_draft: int) -> tuple[Complete, Callable[[], float]]:
    """Load llama-cpp-python, in one thread; return a function that completes a prompt, and one that returns the CPU
    seconds so far.
    """
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    from drafter_service.plugins.llama_cpp import SsdDraftModel

    with model_file() as file:
        options = {"n_ctx": CONTEXT, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
        llama = Llama(str(file), logits_all=method != "none", **options)
    if method.startswith("prompt-lookup"):
        llama.draft_model = LlamaPromptLookupDecoding(num_pred_tokens=int(method.removeprefix("prompt-lookup-")))
    elif method != "none":
        settings = {"sidecar": "embedded"} if method == "ssd-embedded" else {}
        llama.draft_model = SsdDraftModel(llama, max_draft=max_draft, **settings)
    generate, evaluate = llama.generate, llama.eval
    output: list[int] = []
    steps = 0

    def generate_and_keep(*arguments: Any, **named: Any) -> Iterator[int]:
        for token in generate(*arguments, **named):
            output.append(token)
            yield token

    def count_and_eval(tokens: list[int]) -> None:
        nonlocal steps
        steps += 1
        evaluate(tokens)

    def complete(prompt: str, max_tokens: int, is_random: bool) -> tuple[list[int], int]:
        nonlocal steps
        steps = 0
        output.clear()
        sampling = {**RANDOM, "seed": len(prompt)} if is_random else {"temperature": 0.0}
        llama(prompt, max_tokens=max_tokens, **sampling)
        return [*output], steps - 1

    llama.generate, llama.eval = generate_and_keep, count_and_eval
    return complete, time.process_time


def open_server(method: str, _max_draft: int) -> tuple[Complete, Callable[[], float]]:
    """Run llama.cpp's server, in one thread of its own process; return functions as `open_python` does."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    with model_file() as file:
        command = ["llama-server", "--model", str(file), "--port", str(port), "--ctx-size", str(CONTEXT)]
        # Unlike the server, llama-cpp-python keeps no prompts of earlier requests by default.
        command += ["--parallel", "1", "--threads", "1", "--threads-batch", "1", "--no-ui", "--cache-ram", "0"]
        command += ["--spec-type", method.rstrip("-0123456789"), *SERVER_FLAGS[method].split()]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        Finalize(None, process.kill, exitpriority=1)  # at the end of this process
        await_start(process, f"{url}/health")

    def complete(prompt: str, max_tokens: int, is_random: bool) -> tuple[list[int], int]:
        body: dict[str, Any] = {"prompt": prompt, "n_predict": max_tokens, "return_tokens": True}
        body |= {**RANDOM, "seed": len(prompt)} if is_random else {"temperature": 0.0}
        content = {"Content-Type": "application/json"}
        with urlopen(Request(f"{url}/completion", json.dumps(body).encode(), content)) as response:
            answer = json.loads(response.read())
        tokens = answer["tokens"]
        return tokens, len(tokens) - 1 - answer["timings"].get("draft_n_accepted", 0)

    return complete, lambda: cpu_seconds(process.pid)


def await_start(process: subprocess.Popen[bytes], url: str) -> None:
    """Wait until a process serves an address. Raises SystemExit if it does not."""
    until = time.monotonic() + START_S
    while time.monotonic() < until and process.poll() is None:
        try:
            urlopen(url).close()
            return
        except OSError:
            time.sleep(0.1)
    process.kill()
    raise SystemExit("llama-server did not start")


LLAMA_HOSTS = {"llama-cpp": open_python, "llama-server": open_server}
LLAMA_METHODS = {"llama-cpp": PYTHON_METHODS, "llama-server": tuple(SERVER_FLAGS)}
