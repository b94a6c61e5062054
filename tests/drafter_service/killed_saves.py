"""Save a corpus repeatedly in processes that are killed during the save, and check the file after each.

python -m tests.drafter_service.killed_saves FOLDER ROUNDS SEED prints how often each of the two versions was found.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import sys
import time
from pathlib import Path

import numpy as np

from ssd.corpus.corpus import Corpus
from ssd.corpus.snapshot import load, save

TOKENS = 400_000
DEPTH = 32


def corpus_of(version):
    """Return a corpus of two texts: a long one, equal in all versions, and one that contains the version."""
    corpus = Corpus(1_000_000, DEPTH)
    corpus.append(np.random.default_rng(0).integers(0, 50_000, TOKENS).astype(np.uint32), "bulk")
    corpus.append(np.full(1000, version, np.uint32), "version")
    corpus.refresh()
    return corpus


def saved_by_a_process(corpus, path):
    """Fork a process that saves the corpus; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            save(corpus, path)
        finally:
            os._exit(0)
    return pid


def kill_at(pid, path, size):
    """Kill the process once it has written `size` bytes, unless it ends earlier."""
    while os.waitpid(pid, os.WNOHANG) == (0, 0):
        written = 0
        for part in path.parent.glob(f".{path.name}.*.part"):
            with contextlib.suppress(FileNotFoundError):
                written = max(written, part.stat().st_size)
        if written >= size:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0)


def version_on_disk(path):
    """Return the version of a snapshot, which must be complete."""
    corpus = load(path, 1_000_000, DEPTH).corpus
    text = corpus._index.ring.read(0, corpus._index.ring.head)
    version = int(text[-2])
    expected = corpus_of(version)._index
    assert np.array_equal(text, expected.ring.read(0, expected.ring.head)), "the text differs"
    return version


def main(folder, rounds, seed):
    path, rng = Path(folder) / "corpus.ssd", random.Random(seed)
    version = 1
    size = save(corpus_of(version), path)
    kept = 0
    for _ in range(rounds):
        # Some sizes exceed the file's: then the process is killed between the last write and the rename.
        kill_at(saved_by_a_process(corpus_of(version + 1), path), path, rng.randrange(1, int(1.1 * size)))
        found = version_on_disk(path)
        assert found in (version, version + 1), f"the file has version {found}, neither {version} nor the next"
        kept += found == version
        version = found
    save(corpus_of(version), path)
    assert [left.name for left in path.parent.iterdir()] == [path.name], "files of killed processes remain"
    print(kept, rounds - kept)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
