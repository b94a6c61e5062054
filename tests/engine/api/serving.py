"""Start the real server through its command."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import httpx

from engine.models.shipped import SHIPPED_MODEL
from tests import waiting

TIMEOUT_S = 150
"""Generous, since test machines are shared."""
eventually = partial(waiting.eventually, timeout_s=TIMEOUT_S)
MODEL = "stdlib-7m"
KEY = "secret"
"""The clients of all tests send it; the shared server needs it."""


def metric(http, name):
    """Return the sum of a metric's samples."""
    lines = [line for line in http.get("/metrics").text.splitlines() if line.startswith(name + "{")]
    assert lines, name
    return sum(float(line.rpartition(" ")[2]) for line in lines)


PROMPTS = {"completions": {"prompt": "x"}, "chat/completions": {"messages": [{"role": "user", "content": "x"}]}}


def complete(http, route="completions", **fields):
    """Return the text of the first output of a request, and the whole answer."""
    answer = http.post(f"/v1/{route}", json={"model": MODEL} | PROMPTS[route] | fields)
    assert answer.status_code == 200, answer.text
    choice = answer.json()["choices"][0]
    return choice["text"] if route == "completions" else choice["message"]["content"], answer.json()


def refusal(http, route, **fields):
    """Return the error of a request that is refused in one line. Fields may have values that JSON does not allow."""
    body = json.dumps({"model": MODEL} | PROMPTS[route] | fields)
    answer = http.post(f"/v1/{route}", content=body, headers={"Content-Type": "application/json"})
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"]
    assert "\n" not in error["message"]
    return error


def nested(depth):
    """Return a JSON schema that is nested so deeply."""
    schema = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def newest_child(pid):
    """Return the id of the child of a process that was started last: of a server its engine, of an engine its rank."""
    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[-1])


@contextmanager
def serving(*arguments, model=SHIPPED_MODEL):
    """Run `ssd-engine serve` on a free port, in its own process group; yields its `url` and `process`, what it has
    `printed`, a client `http`, and an `early` answer, to a request that was sent before the model was loaded.

    A server that still runs at the end is idle, and must end at once.
    """
    command = [sys.executable, "-m", "engine.commands.main", "serve", "--model", str(model), "--port", "0"]
    machine = ("--device", "cpu", "--threads", "1")
    process = subprocess.Popen(
        [*command, *machine, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0
    )
    try:
        printed = process.stdout.readline()
        assert "loading" in printed, process.stderr.read()
        url = re.search(r"http://\S+", printed)[0]
        headers = {"Authorization": f"Bearer {KEY}"}
        with httpx.Client(base_url=url, timeout=TIMEOUT_S, headers=headers) as http:
            early = http.post("/v1/completions", json={})
            while "serving at" not in printed:
                line = process.stdout.readline()
                assert line, process.stderr.read()
                printed += line
            yield SimpleNamespace(url=url, process=process, printed=printed, http=http, early=early)
        if process.poll() is None:
            process.terminate()
            assert process.wait(TIMEOUT_S) == 0
            assert process.stdout.read() == "stopping\n"
    finally:
        process.kill()
        process.communicate(timeout=TIMEOUT_S)
