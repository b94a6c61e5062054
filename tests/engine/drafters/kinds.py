"""Kinds of drafters that need no weights, for tests that run all of them, and snapshots for the drafter `rest`."""

from __future__ import annotations

from contextlib import closing

import numpy as np

from engine.drafters.base import TargetInfo
from engine.drafters.registry import KINDS, SNAPSHOT_PATH
from ssd.config import DrafterConfig
from ssd.corpus import snapshot
from ssd.corpus.corpus import Corpus
from tests.engine.chain import MODEL, PAGE_SIZE

WITHOUT_WEIGHTS = [name for name, kind in KINDS.items() if not kind.runs_model]
EMBEDDED = [name for name in WITHOUT_WEIGHTS if name != "ssd-remote"]
"""Kinds that need neither weights nor a sidecar."""


def config_of(kind, corpus_file, **settings):
    """Settings of a drafter, with the options that its kind cannot do without."""
    return DrafterConfig(options={SNAPSHOT_PATH: str(corpus_file)} if kind == "rest" else {}, **settings)


def target_of(model=MODEL):
    """A target with the configuration of a model, by default the chain model's."""
    return TargetInfo(model, max_sequences=8, max_draft=16, page_size=PAGE_SIZE)


def saved_snapshot(path, requests, capacity=50_000, depth=DrafterConfig.match_depth):
    """Save a corpus with the tokens of requests, and return the path."""
    with closing(Corpus(capacity, depth)) as corpus:
        for tokens in requests:
            corpus.append(np.asarray(tokens, np.uint32))
        snapshot.save(corpus, path)
    return path
