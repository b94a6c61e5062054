"""Drafting beside the forward: the same tokens, and no waiting where a draft is at hand."""

from dataclasses import replace

import numpy as np
import pytest

from engine.build import build_engine
from engine.config import EngineConfig
from engine.drafters.none import NoDrafter
from engine.drafters.registry import KINDS, build_drafter
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.types import DraftBatch, Path
from tests.engine.chain import VOCAB, ChainRunner, answer, chain_engine
from tests.engine.test_core import CONFIG, outputs, requests

PROMPT = np.array([3, 1, 4, 1, 5], np.uint32)
TOKENS = 60
OVERLAPPED = EngineConfig(max_sequences=1, max_draft=4, max_step_tokens=64, loop="overlapped")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    from engine.models.loader import load_model
    from tests.engine.test_core import make_folder

    folder = tmp_path_factory.mktemp("model")
    make_folder(folder)
    return load_model(folder)


@pytest.mark.parametrize("shape", ["path", "tree"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drafter", KINDS)
def test_the_overlapped_loop_gives_the_tokens_of_the_plain_one(
    model, server, socket_address, drafter, temperature, shape
):
    asked = requests(12, temperature=temperature)
    plain = outputs(build_engine(model, CONFIG, NoDrafter()), asked)
    config = replace(CONFIG, loop="overlapped", draft_shape=shape)
    drafts = build_drafter(
        drafter, DrafterConfig(capacity=10_000, shape=shape), address=socket_address, warn=pytest.fail
    )
    engine = build_engine(model, config, drafts)
    completions = [engine.generate(asked) for _ in range(2)]
    engine.close()
    for again in completions:
        assert [completion.tokens.tolist() for completion in again] == plain
    # The second time the corpus knows the answers.
    assert drafter in ("none", "ngram") or sum(c.accepted for c in completions[1]) > len(asked)


class Journal:
    """Notes in which order the drafter is asked and waited for, and the model runs."""

    def __init__(self, right):
        self.right = right
        """How many tokens of its drafts are right."""
        self.events = []
        self.outcomes = []
        self.offered = 0
        self.text = 0

    def start(self, sequence_id, prompt):
        self.text = 0

    def draft(self, progress):
        return self.ask(progress).result()

    def ask(self, progress):
        self.events.append("ask")
        self.outcomes.append((self.offered, int(progress.verified[0]), len(progress.tokens)))
        self.text += len(progress.tokens)
        tokens = answer(PROMPT, TOKENS)[self.text :][: int(progress.max_draft[0])]
        tokens = [token if place < self.right else (token + 1) % VOCAB for place, token in enumerate(tokens)]
        self.offered = len(tokens)
        path = Path(np.array(tokens, np.uint32), np.ones(len(tokens), np.float32))
        return JournalAnswer(self, DraftBatch.from_paths([path]))

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.events.append("finish")
        self.outcomes.append((self.offered, verified, len(tokens)))

    def close(self):
        self.events.append("close")


class JournalAnswer:
    def __init__(self, journal, drafts):
        self.journal = journal
        self.drafts = drafts

    def result(self):
        self.journal.events.append("wait")
        return self.drafts


def journal_of(monkeypatch, *, right, config=OVERLAPPED):
    journal = Journal(right)
    forward = ChainRunner.forward

    def noted(runner, batch):
        journal.events.append("forward")
        return forward(runner, batch)

    monkeypatch.setattr(ChainRunner, "forward", noted)
    engine = chain_engine(config, 40, journal)
    [completion] = engine.generate([Request(PROMPT, SamplingParams(max_tokens=TOKENS))])
    engine.close()
    assert completion.tokens.tolist() == answer(PROMPT, TOKENS)
    return journal, completion


def test_with_right_drafts_nobody_waits_but_for_the_first(monkeypatch):
    journal, completion = journal_of(monkeypatch, right=100)
    events = journal.events
    # What is asked for behind a step is waited for behind the next one.
    assert events[:6] == ["ask", "wait", "forward", "ask", "forward", "wait"]
    waits = [events[place - 1 : place + 2] for place, event in enumerate(events) if event == "wait"]
    assert sum(after == "forward" for _, _, after in waits[1:]) == 0
    assert completion.accepted == completion.drafted
    assert completion.steps <= -(-TOKENS // 5)


def test_with_wrong_drafts_every_step_waits_for_new_ones(monkeypatch):
    journal, completion = journal_of(monkeypatch, right=1)
    assert completion.accepted > TOKENS // 3
    assert "forward ask wait forward ask wait" in " ".join(journal.events)
    assert "ask forward" not in " ".join(journal.events)


@pytest.mark.parametrize("right", [0, 1, 3, 7, 100])
def test_the_drafter_hears_only_of_its_own_last_draft(monkeypatch, right):
    journal, completion = journal_of(monkeypatch, right=right)
    assert all(verified <= offered for offered, verified, _ in journal.outcomes)
    if right == 100:
        assert sum(verified for _, verified, _ in journal.outcomes) == completion.drafted


def test_what_is_asked_for_a_cancelled_request_is_taken_before_it_ends():
    journal = Journal(100)
    engine = chain_engine(OVERLAPPED, 40, journal)
    sequence_id = engine.add(Request(PROMPT, SamplingParams(max_tokens=TOKENS)))
    engine.step()
    engine.step()
    engine.cancel(sequence_id)
    assert journal.events[-2:] == ["wait", "finish"]
    engine.close()


def test_a_drafter_is_released_even_if_what_it_was_asked_for_failed(monkeypatch):
    journal = Journal(100)
    engine = chain_engine(OVERLAPPED, 40, journal)
    engine.add(Request(PROMPT, SamplingParams(max_tokens=TOKENS)))
    engine.step()

    def fail(answer):
        raise RuntimeError("the drafter broke")

    monkeypatch.setattr(JournalAnswer, "result", fail)
    with pytest.raises(RuntimeError, match="the drafter broke"):
        engine.close()
    assert journal.events[-1] == "close"
