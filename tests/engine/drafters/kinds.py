"""Kinds of drafters that need no weights, for tests that run all of them."""

from __future__ import annotations

from engine.drafters.base import TargetInfo
from engine.drafters.registry import KINDS, SNAPSHOT_PATH
from ssd.config import DrafterConfig
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
