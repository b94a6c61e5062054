"""Kill a sidecar and three engines that draft from copies of its corpus, and compare the copies with it afterwards.

python -m tests.drafter_service.killed_replicas FOLDER KILLS SEED prints how many texts all of them have in the end, and
the seconds after the last text in which the copies became equal.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path

from drafter_service.client.replica import ReplicaClient
from ssd.corpus.requests import hash_of
from ssd.corpus.snapshot import load
from ssd.errors import UserError
from tests.drafter_service.raw import connected, counted, eventually
from tests.replay import progress_of
from tests.servers import SERVE
from tests.strategies import array

NAMESPACE = "own"
ENGINES = 3
LIMIT_S = 120.0
"""Time in which the copies must become equal to the corpus, even on a slow machine."""


def run_engine(address, seed):
    """Produce texts until "stop" arrives on standard input. Print what the copy has for each line "report"."""
    rng, has_ended, forgotten = random.Random(seed), threading.Event(), []

    def listen():
        for line in sys.stdin:
            if line == "stop\n":
                has_ended.set()
                continue
            corpus = client.copy.corpus
            held = [] if corpus is None else sorted(corpus.request_times())
            print(json.dumps({"held": held, "forgotten": forgotten, "ended": has_ended.is_set()}), flush=True)

    with ReplicaClient(address, namespace=NAMESPACE, required=False) as client:
        listening = threading.Thread(target=listen)
        listening.start()
        number = 0
        while not has_ended.wait(0.01):
            name, text = f"{seed}-{number}", counted(rng.randrange(1000), rng.randrange(20, 60))
            client.start(number, array(text[:8]), request_id=name)
            for first in range(8, len(text), 4):
                client.draft(progress_of({number: text[first : first + 4]}, 4))
            client.finish(number, array([]))
            number += 1
            if rng.random() < 0.02:
                try:
                    client.forget(name)
                    forgotten.append(hash_of(name))
                except UserError:  # The sidecar has been killed.
                    pass
        listening.join()


class Engine:
    """A process that runs `run_engine`."""

    def __init__(self, address, seed):
        command = [sys.executable, "-m", __spec__.name, "engine", address, str(seed)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def stop(self):
        print("stop", file=self.process.stdin, flush=True)

    def report(self):
        print("report", file=self.process.stdin, flush=True)
        return json.loads(next(line for line in self.process.stdout if line.startswith("{")))

    def kill(self):
        self.process.send_signal(signal.SIGKILL)
        self.process.communicate()


def start_sidecar(address, folder):
    command = [*SERVE, "--listen", address, "--capacity", "16M", "--snapshot-folder", folder, "--log-level", "error"]
    environment = {**os.environ, "SSD_DRAFTER_SNAPSHOTS__INTERVAL_S": "2"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True)
    assert "listening at" in process.stdout.readline()
    return process


def main(folder, kills, seed):
    address, snapshots, rng = f"unix:{folder}/drafter.sock", Path(folder, "snapshots"), random.Random(seed)
    seeds = iter(range(seed * 10_000, (seed + 1) * 10_000))
    processes = {"sidecar": start_sidecar(address, snapshots)}
    engines = [Engine(address, next(seeds)) for _ in range(ENGINES)]

    def all_have_text():
        return all(each.report()["held"] for each in engines)

    with ExitStack() as stack:
        stack.callback(lambda: processes["sidecar"].kill())
        stack.callback(lambda: [each.kill() for each in engines])
        for _ in range(kills):
            eventually(all_have_text)
            if rng.random() < 0.3:
                processes["sidecar"].kill()
                processes["sidecar"].wait()
                processes["sidecar"] = start_sidecar(address, snapshots)
            else:
                at = rng.randrange(ENGINES)
                engines[at].kill()
                engines[at] = Engine(address, next(seeds))
        eventually(all_have_text)
        for each in engines:
            each.stop()
        eventually(lambda: all(each.report()["ended"] for each in engines))
        texts, late_s = compared(address, snapshots / NAMESPACE / "corpus.ssd", engines)
    print(texts, f"{late_s:.1f}")


def compared(address, path, engines):
    """Wait until the copies equal the corpus; return its number of texts, and the seconds that this took."""
    began = time.monotonic()
    with connected(address) as caller:
        while True:
            caller.call("Snapshot", namespace=NAMESPACE)
            held = sorted(load(path).corpus.request_times())
            reports = [each.report() for each in engines]
            if held and all(report["held"] == held for report in reports):
                break
            sizes = [len(report["held"]) for report in reports]
            assert time.monotonic() < began + LIMIT_S, f"{sizes} texts in the copies, {len(held)} in the corpus"
    for report in reports:
        assert not set(report["forgotten"]) & set(held), "forgotten text was learned again"
    return len(held), time.monotonic() - began


if __name__ == "__main__":
    if sys.argv[1] == "engine":
        run_engine(sys.argv[2], int(sys.argv[3]))
    else:
        main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
