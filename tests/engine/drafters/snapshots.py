"""Snapshots for the drafter `rest`."""

from contextlib import closing

import numpy as np

from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus


def saved_snapshot(path, requests, capacity=50_000, depth=DrafterConfig.match_depth):
    """Save a corpus with the tokens of requests, and return the path."""
    with closing(Corpus(capacity, depth)) as corpus:
        for tokens in requests:
            corpus.append(np.asarray(tokens, np.uint32))
        snapshot.save(corpus, path)
    return path
