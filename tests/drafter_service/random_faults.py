"""Inject random faults into a sidecar under load, and check after each that nothing that was saved is lost.

python -m tests.drafter_service.random_faults FOLDER FAULTS SEED prints how often each was injected, and the most that
the sidecar used. Faults are errors of the disk, calls of it that stall, no free descriptors, calls that their callers
cancel, and kill -9. Meanwhile texts are learned, saved and forgotten, and namespaces are unloaded and loaded again,
since the memory limit allows only some of them.
"""

from __future__ import annotations

import os
import random
import resource
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import grpc

from drafter_service.server.namespaces import max_bytes
from ssd.corpus.snapshot import load
from tests.drafter_service.raw import batch, connected, counted, drafted, eventually, start, status_of, texts

CAPACITY = 100_000
MEMORY_LIMIT = 4 * max_bytes(CAPACITY)
NAMESPACES = ("a", "b", "c", "d", "e", "f")
"""More than the memory limit allows at once. The first one always has a stream."""
TEXT_TOKENS = 40
MAX_TEXTS = CAPACITY // 2 // TEXT_TOKENS
"""Number of texts of a namespace that are expected; older ones may be overwritten."""

ERRORS = ("ENOSPC", "EIO", "EACCES", "EMFILE", "ENFILE", "ENOMEM", "ESTALE")
OTHERS = ("STALL", "STALL", "descriptors", "cancel", "cancel")
SHARES = (1.0, 0.3, 0.05)
"""Shares of the calls of the file system that fail."""
KILLS = 0.02
CALL_LIMIT_S = 60.0
"""Longest time of a call: a multiple of `DISK_LIMIT_S`, for busy machines."""
EXPECTED = {
    grpc.StatusCode.UNAVAILABLE,
    grpc.StatusCode.FAILED_PRECONDITION,
    grpc.StatusCode.RESOURCE_EXHAUSTED,
    grpc.StatusCode.CANCELLED,
}
"""Status codes of calls that a fault may cause."""
MORE_THREADS, MORE_FILES, MORE_BYTES = 24, 24, 120_000_000
"""What the sidecar may use above what it uses after its start and, for memory, the memory limit."""


class Sidecar:
    """The process, its address and its use of resources."""

    def __init__(self, folder):
        self.snapshots, self.control, self._log = folder / "snapshots", folder / "control", folder / "log"
        self.snapshots.mkdir(parents=True)
        self.control.touch()
        self.address = f"unix:{folder}/drafter.sock"
        self.most = Counter()
        self.starts = 0
        self._start()

    def _start(self):
        command = [sys.executable, "-m", "tests.drafter_service.faulty_sidecar", self.snapshots, self.control, "serve"]
        command += ["--listen", self.address, "--capacity", CAPACITY, "--memory-limit", MEMORY_LIMIT]
        command += ["--snapshot-folder", self.snapshots]
        environment = os.environ | {"SSD_DRAFTER_SNAPSHOTS__INTERVAL_S": "0.2"}
        with self._log.open("a") as log:
            self.process = subprocess.Popen(
                [*map(str, command)], stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
        assert "listening at" in self.process.stdout.readline(), self._log.read_text()
        self.starts += 1
        self._stack = ExitStack()
        self.caller = self._stack.enter_context(connected(self.address))
        self._before = None
        self.used()

    def used(self):
        """Return threads, files and bytes in use, above what was used first; record the most."""
        folder = Path(f"/proc/{self.process.pid}")
        pages = int((folder / "statm").read_text().split()[1])
        now = Counter(
            threads=len(os.listdir(folder / "task")),
            files=len(os.listdir(folder / "fd")),
            bytes=pages * resource.getpagesize(),
        )
        self._before = self._before or now
        used = Counter({name: now[name] - self._before[name] for name in now})
        self.most |= used
        return used

    def fail(self, fault=""):
        """Let calls of the file system fail from now on; "": none."""
        part = self.control.with_suffix(".part")
        part.write_text(fault)
        part.replace(self.control)

    def limit_files(self, *, to_none_free):
        """Allow the process no more files than it has, or as many as before."""
        _, most = resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE)
        files = {int(number) for number in os.listdir(f"/proc/{self.process.pid}/fd")}
        free = next(number for number in range(most) if number not in files)
        resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (free if to_none_free else most, most))

    def restart(self):
        """Start the process again, after it was killed."""
        self._stack.close()
        self._start()

    def stop(self):
        """Stop the process as a supervisor does."""
        self._stack.close()
        self.process.terminate()
        assert self.process.wait(CALL_LIMIT_S) == 0, self._log.read_text()[-2000:]

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.process.kill()
        self.process.communicate()
        self._stack.close()


def require_expected(problem):
    """Raise AssertionError for an exception of gRPC that no fault may cause."""
    if problem.code() not in EXPECTED:
        raise AssertionError(f"a call ended with {problem.code()}: {problem.details()}")


class Load:
    """Random calls, and the texts that must be in the snapshot of each namespace."""

    def __init__(self, sidecar, rng):
        self.sidecar, self._rng = sidecar, rng
        self.learned = {name: {} for name in NAMESPACES}
        """First tokens of the acknowledged texts, by namespace and name."""
        self.saved = {name: {} for name in NAMESPACES}
        self._first = 0
        self.longest_s = 0.0
        self.ended = Counter()
        """Number of calls by result."""
        self._stream = None

    def call(self, method, **fields):
        """Make a call; return its response, None if a fault ended it."""
        began = time.monotonic()
        try:
            response = self.sidecar.caller.call(method, **fields)
        except grpc.RpcError as problem:
            require_expected(problem)
            response = None
        taken = time.monotonic() - began
        assert taken < CALL_LIMIT_S, f"{method} took {taken:.1f} s"
        self.longest_s = max(self.longest_s, taken)
        self.ended[method, response is not None] += 1
        return response

    def learn(self, name):
        """Let a namespace learn a new text; return whether it has."""
        self._first += 2 * TEXT_TOKENS
        text = f"{name}-{self._first}"
        message = texts(counted(self._first, TEXT_TOKENS), names=[text])
        response = self.call("Observe", namespace=name, texts=message)
        if response is not None and response.texts:
            self.learned[name][text] = self._first
        return response is not None

    def save(self, name):
        """Save a namespace; return whether it was. One that was unloaded is saved."""
        before = dict(self.learned[name])
        response = self.call("Snapshot", namespace=name)
        if response is not None:
            self.saved[name] = {text: first for text, first in before.items() if text in self.learned[name]}
        return response is not None

    def forget(self, name):
        """Forget a text."""
        text = self._rng.choice(list(self.learned[name]))
        first = self.learned[name].pop(text)
        self.saved[name].pop(text, None)
        if self.call("Forget", namespace=name, request_id=text) is not None:
            assert text not in kept_texts(self.sidecar, name, {text: first}), f"{text} was forgotten and is on disk"

    def cancel(self):
        """Begin calls and cancel them after a moment; what they do is not known."""
        name = self._rng.choice(NAMESPACES)
        for _ in range(self._rng.randrange(1, 6)):
            method = self._rng.choice(["Snapshot", "Report", "ListNamespaces", "Observe"])
            fields = {} if method == "ListNamespaces" else {"namespace": name}
            call = self.sidecar.caller.begin(method, **fields)
            time.sleep(self._rng.random() * 0.02)
            call.cancel()

    def draft(self):
        """Request drafts in the first namespace, whose stream does not depend on the disk once it has begun."""
        if self._stream is None:
            try:
                self._stream = self.sidecar.caller.stream(NAMESPACES[0])
            except grpc.RpcError as problem:
                require_expected(problem)
                return
        began = time.monotonic()
        drafted(self._stream.exchange(starts=[start(self._first, [1, 2])], batch=batch({self._first: [3]})))
        taken = time.monotonic() - began
        self.longest_s = max(self.longest_s, taken)
        assert taken < CALL_LIMIT_S

    def end_stream(self):
        """End the stream, so that its deadline is one of a single fault, however many there are."""
        if self._stream is not None:
            self._stream.cut()
            self._stream = None

    def step(self):
        """Make one random call."""
        name = self._rng.choice(NAMESPACES)
        # A namespace exists once it has learned something.
        weights = {self.learn: 6, self.save: 3, self.forget: 1} if self.learned[name] else {self.learn: 1}
        self._rng.choices([*weights], [*weights.values()])[0](name)
        self._first += 2 * TEXT_TOKENS
        self.draft()
        if self._rng.random() < 0.1:
            self.call("ListNamespaces")

    def kill(self, rng):
        """Kill the process while it drafts, learns and saves, and start it again, without what was not saved."""
        caller, name = self.sidecar.caller, rng.choice(NAMESPACES)
        self._first += 2 * TEXT_TOKENS
        self.draft()
        for _ in range(50):
            self._stream.send(batch=batch({self._first: counted(1, 4)}, 16))
        calls = [
            caller.begin("Observe", namespace=name, texts=texts(counted(1 << 30, CAPACITY // 5))),
            caller.begin("Snapshot", namespace=name),
        ]
        time.sleep(rng.random() * 0.01)
        self.sidecar.process.kill()
        self.sidecar.process.wait()
        assert status_of(lambda: [*self._stream.call])[0] is grpc.StatusCode.UNAVAILABLE
        self.sidecar.restart()
        assert all(call.done() for call in calls)
        self._stream = None
        self.learned = {name: dict(saved) for name, saved in self.saved.items()}
        for name, saved in self.saved.items():
            for first in [*saved.values()][-1:]:
                assert self.sidecar.caller.probe(name, counted(first, 8), limit=1) == [first + 8]


def kept_texts(sidecar, name, expected):
    """Return which of the expected texts the snapshot of a namespace has, unchanged."""
    path = sidecar.snapshots / name / "corpus.ssd"
    if not path.exists():
        return set()
    corpus = load(path).corpus
    return {text for text, first in expected.items() if corpus.text_of(text).tolist() == counted(first, TEXT_TOKENS)}


def check(load_, names=NAMESPACES):
    """Check that all saved texts are on disk, and nothing was set aside."""
    for name in names:
        for older in list(load_.learned[name])[:-MAX_TEXTS]:
            del load_.learned[name][older]
            load_.saved[name].pop(older, None)
        lost = load_.saved[name].keys() - kept_texts(load_.sidecar, name, load_.saved[name])
        assert not lost, f"{len(lost)} saved texts of {name} are lost, such as {min(lost)}"
    aside = list(load_.sidecar.snapshots.glob("*/*.refused*"))
    assert not aside, f"files were set aside, though none was damaged: {aside}"


def inject(load_, kind, share, rng):
    """Cause a fault, make calls during it, and end it."""
    sidecar = load_.sidecar
    if kind in (*ERRORS, "STALL"):
        sidecar.fail(f"{kind} {share}")
    elif kind == "descriptors":
        sidecar.limit_files(to_none_free=True)
    for _ in range(rng.randrange(2, 6)):
        if kind == "cancel":
            load_.cancel()
        load_.step()
        sidecar.used()
    if kind == "kill":
        load_.kill(rng)
    if kind == "descriptors":
        sidecar.limit_files(to_none_free=False)
    sidecar.fail()


def main(folder, faults, seed):
    rng, injected = random.Random(seed), Counter()
    with Sidecar(Path(folder)) as sidecar:
        load_ = Load(sidecar, rng)
        for number in range(faults):
            is_kill = rng.random() < KILLS or number == faults // 2
            kind = "kill" if is_kill else rng.choice(ERRORS + OTHERS)
            injected[kind] += 1
            load_.end_stream()
            inject(load_, kind, rng.choice(SHARES), rng)
            # Everything works again as soon as the fault is over.
            name = rng.choice(NAMESPACES)
            eventually(lambda name=name: load_.learn(name), CALL_LIMIT_S)
            eventually(lambda name=name: load_.save(name), CALL_LIMIT_S)
            check(load_)
            eventually(lambda: sidecar.used()["threads"] <= MORE_THREADS, CALL_LIMIT_S)
            used = sidecar.used()
            assert used["files"] <= MORE_FILES, f"{used} more than at the start"
            assert used["bytes"] <= MEMORY_LIMIT + MORE_BYTES, f"{used} more than at the start"
        for name in NAMESPACES:
            eventually(lambda name=name: load_.save(name) or not load_.learned[name], CALL_LIMIT_S)
        sidecar.stop()
        check(load_)
    saved = sum(map(len, load_.saved.values()))
    print(f"faults {dict(injected)}; calls answered {sum(n for (_, ok), n in load_.ended.items() if ok)}, ", end="")
    print(f"refused {sum(n for (_, ok), n in load_.ended.items() if not ok)}; saved texts {saved}, lost 0; ", end="")
    print(f"longest call {load_.longest_s:.2f} s; most above the start {dict(sidecar.most)}; starts {sidecar.starts}")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
