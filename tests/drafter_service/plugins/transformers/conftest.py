"""The shipped model, and the plug-in with an embedded drafter."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter_service.plugins.transformers import SsdGenerate
from drafter_service.plugins.transformers.generate import LOG
from tests.drafter_service.plugins.helpers import lines_of, session_of
from tests.drafter_service.plugins.transformers.generation import FOLDER


@pytest.fixture(scope="package")
def model():
    return AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)


@pytest.fixture(scope="package")
def tokenizer():
    return AutoTokenizer.from_pretrained(FOLDER)


@pytest.fixture
def ssd(model):
    with SsdGenerate(model, sidecar="embedded", capacity=20_000) as ssd:
        yield ssd
        assert ssd.counters.failures == 0


@pytest.fixture
def untimed(ssd, monkeypatch):
    """Return the plug-in without durations of steps, on which the lengths of drafts depend."""
    monkeypatch.setattr(session_of(ssd), "record_step", lambda *_: None)
    return ssd


@pytest.fixture
def log():
    """Return the lines of the plug-in's log."""
    with lines_of(LOG) as lines:
        yield lines
