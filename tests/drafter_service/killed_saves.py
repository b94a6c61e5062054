"""Saves a corpus again and again in processes that are killed meanwhile; checks what lies on disk after each.

python -m tests.drafter_service.killed_saves FOLDER ROUNDS SEED prints how often the old and the new snapshot lay there.
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
    """One of many tokens, the same for all versions, and one that tells the version."""
    corpus = Corpus(1_000_000, DEPTH)
    corpus.append(np.random.default_rng(0).integers(0, 50_000, TOKENS).astype(np.uint32), "bulk")
    corpus.append(np.full(1000, version, np.uint32), "version")
    corpus.refresh()
    return corpus


def saved_by_a_process(corpus, path):
    """A process that saves the corpus."""
    pid = os.fork()
    if pid == 0:
        try:
            save(corpus, path)
        finally:
            os._exit(0)
    return pid


def kill_at(pid, path, size):
    """Kill the process once it has written so many bytes, or has ended by itself."""
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
    """The version of a snapshot, which must be whole."""
    corpus = load(path, 1_000_000, DEPTH).corpus
    text = corpus._index.ring.read(0, corpus._index.ring.head)
    version = int(text[-2])
    expected = corpus_of(version)._index
    assert np.array_equal(text, expected.ring.read(0, expected.ring.head)), "the text is another one"
    return version


def main(folder, rounds, seed):
    path, rng = Path(folder) / "corpus.ssd", random.Random(seed)
    version = 1
    size = save(corpus_of(version), path)
    kept = 0
    for _ in range(rounds):
        # Some moments beyond the end: between the last byte and the new name.
        kill_at(saved_by_a_process(corpus_of(version + 1), path), path, rng.randrange(1, int(1.1 * size)))
        found = version_on_disk(path)
        assert found in (version, version + 1), f"version {found} lies there, neither {version} nor the next"
        kept += found == version
        version = found
    save(corpus_of(version), path)
    assert [left.name for left in path.parent.iterdir()] == [path.name], "what the killed left was not cleared away"
    print(kept, rounds - kept)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
