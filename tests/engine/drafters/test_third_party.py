"""Drafters from another package: selected on the command line, and contained if they are faulty."""

import sys
from dataclasses import replace

import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter, configure
from engine.engine import build_engine
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from tests.engine.test_core import outputs, requests

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=128, max_draft=6)
SOURCE = '''
import numpy as np
from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.drafts import Drafts
from ssd.types import DraftBatch, offsets_of

NEEDS = {
    "top_k": TargetOutputs(top_k=10**6), "hidden_layers": TargetOutputs(hidden_layers=(99,)),
    "extra_rows": TargetOutputs(extra_rows=-1), "needs": None,
}

class Repeater(Drafter):
    """Drafts the last token twice, or fails in the way that its option `fault` names."""
    needs = TargetOutputs()

    def __init__(self, config, target):
        self.fault, self.vocab_size = config.options.get("fault"), target.vocab_size
        self.calls = 0
        if self.fault == "constructor":
            raise RuntimeError("no weights")
        if self.fault in NEEDS:
            self.needs = NEEDS[self.fault]

    def bind(self, forward):
        if self.fault == "bind":
            raise RuntimeError("no memory")

    def propose(self, plan):
        self.calls += 1
        if self.fault == "raises":
            raise RuntimeError("no idea")
        sizes = np.minimum(2, plan.rooms)
        last = [int(sequence.tokens[-1]) for sequence in plan.producing]
        tokens = np.repeat(np.array(last, np.uint32), sizes)
        parents = np.concatenate([np.arange(-1, size - 1) for size in sizes]).astype(np.int32)
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


def drafter_of(model, name=NAME, **options):
    target = TargetInfo.from_model(model, CONFIG)
    return build_drafter(name, configure(name, DrafterConfig(), options), target)


@pytest.mark.usefixtures("package")
def test_a_third_party_drafter_drafts(model):
    engine = build_engine(model, CONFIG, drafter_of(model))
    completions = engine.generate(requests(6))
    assert [each.tokens.tolist() for each in completions] == outputs(
        build_engine(model, CONFIG, NoDrafter()), requests(6)
    )
    assert sum(each.drafted for each in completions) > 20


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fault", ["raises", "cycle"])
def test_drafts_of_a_faulty_drafter_are_dropped_and_reported_once(model, fault, caplog):
    drafter = drafter_of(model, fault=fault)
    engine = build_engine(model, replace(CONFIG, verification="rejection"), drafter)
    completions = engine.generate(requests(6))
    assert [each.tokens.tolist() for each in completions] == outputs(
        build_engine(model, CONFIG, NoDrafter()), requests(6)
    )
    assert not any(each.drafted for each in completions)
    assert drafter.calls > 1
    assert [record.name for record in caplog.records] == ["engine.drafters.guard"]
    caplog.clear()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("constructor", "--drafter repeating_drafter:Repeater: RuntimeError: no weights"),
        ("bind", "Repeater cannot be used: RuntimeError: no memory"),
        ("top_k", "top_k must be 0 to"),
        ("hidden_layers", "hidden_layers must be ascending numbers"),
        ("extra_rows", "extra_rows must not be negative"),
        ("needs", "AttributeError"),
    ],
)
def test_a_drafter_that_cannot_start_gives_a_one_line_error(model, fault, message, caplog):
    with pytest.raises(UserError, match=message) as problem:
        build_engine(model, CONFIG, drafter_of(model, fault=fault))
    assert "\n" not in str(problem.value)
    caplog.clear()


@pytest.mark.usefixtures("package")
def test_a_module_in_the_current_folder_is_found(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert drafter_of(model).calls == 0
