"""Drafters from another package: named on the command line, and contained if they are faulty."""

import sys

import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.none import NoDrafter
from engine.drafters.registry import build_drafter, configure
from engine.engine import build_engine
from ssd.config import DrafterConfig
from tests.engine.test_core import outputs, requests

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=128, max_draft=6)
SOURCE = '''
import numpy as np
from engine.drafters.base import Drafts, TargetOutputs
from ssd.types import DraftBatch, offsets_of

class Repeater:
    """Drafts the last token twice, or as its option `fault` says."""
    needs = TargetOutputs()

    def __init__(self, config, target):
        self.fault, self.vocab_size = config.options.get("fault"), target.vocab_size
        self.asked = 0

    def start(self, sequence): pass
    def observe(self, result): pass
    def finish(self, sequence, learn): pass
    def close(self): pass

    def propose(self, plan):
        self.asked += 1
        if self.fault == "raises":
            raise RuntimeError("no idea")
        sizes = [min(2, entry.draft_room) for entry in plan.producing]
        if self.fault == "too many":
            sizes = [entry.draft_room + 1 for entry in plan.producing]
        last = [int(entry.sequence.tokens[-1]) for entry in plan.producing]
        tokens = np.repeat(np.array(last, np.uint32), sizes)
        parents = np.concatenate([np.arange(-1, size - 1) for size in sizes]).astype(np.int32)
        if self.fault == "out of vocabulary":
            tokens += np.uint32(self.vocab_size)
        if self.fault == "cycle":
            parents += 1
        count = len(tokens)
        batch = DraftBatch(tokens, parents, np.ones(count, np.float32), np.zeros(count, np.uint8), offsets_of(sizes))
        return Drafts(batch)
'''
NAME = "repeating_drafter:Repeater"


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "repeating_drafter.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("repeating_drafter", None)


def drafter_of(model, **options):
    target = TargetInfo.from_model(model, CONFIG)
    return build_drafter(NAME, configure(NAME, DrafterConfig(), options), target)


@pytest.mark.usefixtures("package")
def test_a_third_party_drafter_drafts(model):
    engine = build_engine(model, CONFIG, drafter_of(model))
    completions = engine.generate(requests(6))
    assert [each.tokens.tolist() for each in completions] == outputs(
        build_engine(model, CONFIG, NoDrafter()), requests(6)
    )
    assert sum(each.drafted for each in completions) > 20


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fault", ["raises", "out of vocabulary", "cycle", "too many"])
def test_a_faulty_drafter_costs_its_drafts_and_is_reported_once(model, fault, caplog):
    drafter = drafter_of(model, fault=fault)
    engine = build_engine(model, CONFIG, drafter)
    completions = engine.generate(requests(6))
    assert [each.tokens.tolist() for each in completions] == outputs(
        build_engine(model, CONFIG, NoDrafter()), requests(6)
    )
    assert not any(each.drafted for each in completions)
    assert drafter.asked > 1
    assert [record.name for record in caplog.records] == ["engine.drafters.guard"]
    caplog.clear()
