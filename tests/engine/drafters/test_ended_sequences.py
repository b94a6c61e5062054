"""Drafters hold nothing of sequences that have ended, whether or not their last drafts were verified."""

from contextlib import closing

import numpy as np
import pytest
from torch.nn import Module

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import KINDS, build_drafter
from engine.drafters.tokens import NOT_STARTED
from engine.engine import build_engine
from engine.scheduling.request import Request, SamplingParams
from tests.engine.drafters.kinds import config_of

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=4, kv_memory_mib=1)
STATELESS = ("none", "recycle")
COMBINED = ("ssd+lookahead", "ngram+medusa", "ssd+mtp")


def held(drafter):
    """Return the names of attributes with state by sequence, of a drafter and those inside it."""
    found, owners = set(), [drafter]
    while owners:
        for name, value in vars(owners.pop()).items():
            is_reported = name == "_reported" and (value[:, 0] != NOT_STARTED).any()
            if (isinstance(value, (dict, set)) and value) or is_reported:
                found.add(name)
            owners += [each for each in (value if isinstance(value, list) else [value]) if is_drafting(each)]
    return found


def is_drafting(value):
    return type(value).__module__.startswith("engine.drafters") and not isinstance(value, (tuple, Module))


@pytest.mark.parametrize("kind", [*(kind for kind in KINDS if kind not in ("ssd-remote", *STATELESS)), *COMBINED])
@pytest.mark.parametrize("is_verified", [True, False])
def test_nothing_is_held(model, model_folder, draft_folders, corpus_file, kind, is_verified):
    config = config_of(kind, corpus_file, capacity=10_000, max_draft=CONFIG.max_draft)
    target = TargetInfo.from_model(model, CONFIG, model_folder)
    drafter = build_drafter(kind, config, target, draft_models=draft_folders)
    prompt = np.array([1, 2, 3, 4, 1, 2, 3], np.uint32)
    with closing(build_engine(model, CONFIG, drafter)) as engine:
        ids = [engine.add(Request(prompt, SamplingParams(max_tokens=20, ignore_eos=True))) for _ in range(3)]
        for _ in range(3):
            engine.step()
        if not is_verified:
            engine._speculation.propose(engine.scheduler.plan())
        speculation = engine._speculation
        assert held(speculation.drafter)
        for sequence_id in ids:
            engine.cancel(sequence_id)
        assert held(speculation.drafter) == set()
        assert not getattr(getattr(engine.drafter, "inner", None), "sequence_ids", ())
