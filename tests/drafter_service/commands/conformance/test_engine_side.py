"""The checks of an engine: a correct engine passes, and each planted fault fails the check that is about it."""

from pathlib import Path

import pytest

from drafter_service.commands.conformance.checks import RULES
from drafter_service.commands.conformance.engine_side import EngineChecker
from drafter_service.stubs import drafter_pb2 as pb
from ssd.types import StepTime
from tests.drafter_service.commands.conformance.mini_engine import PROMPT, MiniEngine


def failures(checker=None, **wrong):
    """Return the failures of an engine with these methods and attributes."""
    engine = type("FaultyEngine", (MiniEngine,), wrong)(checker or EngineChecker())
    return engine.run_all()


def counting(report):
    """Return the fault that verified tokens and steps are counted as `report(draft, verified, steps)`."""
    return {"counts": lambda _, *known: report(*known)}


def timing(*report, sequences=lambda _tokens: 1):
    """Return the fault that steps take these times."""
    return {"time_of": lambda _, tokens: StepTime(tokens, sequences(tokens), *report)}


def halved(_, draft):
    return draft[:2]


def test_a_correct_engine_passes():
    engine = MiniEngine(EngineChecker())
    assert engine.run_all() == {}
    assert engine.checker.is_complete


@pytest.mark.parametrize(
    "different",
    [
        {"cut": halved},
        {"dropped": lambda _, drafts: drafts, "steps_after_late": 1},
        {"time_of": lambda *_: None},
    ],
    ids=["verifies a part of each draft", "waits for late answers", "sends no durations"],
)
def test_correct_engines_may_differ(different):
    assert failures(**different) == {}


def keep_late_draft(engine, drafts):
    engine.late = drafts
    return []


def replace_by_late_draft(engine, draft):
    late, engine.late = getattr(engine, "late", None), None if draft else getattr(engine, "late", None)
    return late if late and draft else draft


def test_an_overlapped_engine_may_commit_tokens_of_other_drafts():
    wrong = counting(lambda _draft, _verified, steps: (0, steps))
    assert failures(EngineChecker(is_overlapped=True), **wrong) == {"counts": None, "drafts used": None}
    wrong = counting(lambda _, verified, steps: (verified, steps + 9))
    assert "a step makes one token" in failures(EngineChecker(is_overlapped=True), **wrong)["counts"]


FAULTS = {
    "never finishes": ("finishes", {"finishes": lambda _: False}, "was never finished"),
    "counts the whole draft as verified": (
        "counts", {"cut": halved, **counting(lambda draft, _, steps: (len(draft), steps))}, "verified=4",
    ),
    "counts no token as verified": (
        "counts", counting(lambda *known: (0, known[2])), "committed 5 tokens in steps=1 with verified=0",
    ),
    "counts more than was drafted": (
        "counts", counting(lambda _, verified, steps: (verified + 1, steps)), "verified 1 tokens of a draft of 0",
    ),
    "counts one step for all": (
        "late answer", counting(lambda *known: (known[1], 1)), "committed 2 tokens in steps=1 with verified=0",
    ),
    "counts the draft of a late answer": (
        "late answer",
        counting(lambda _, verified, steps: (4 if steps == 2 and not verified else verified, steps)),
        "verified=4",
    ),
    "verifies a late draft one step too late": (
        "counts",
        {"dropped": keep_late_draft, "cut": replace_by_late_draft, "steps_after_late": 1},
        "which makes 2 tokens",
    ),
    "text that shrinks when a sequence is lost": (
        "lost sequence", {"committed": lambda _, output: output[:3]}, "a start has all committed tokens",
    ),
    "other tokens when a sequence is lost": (
        "broken stream", {"committed": lambda _, output: [5, *output[1:]]}, "of which the first 0 are the same",
    ),
    "forgets lost sequences": ("lost sequence", {"starts_again": lambda _: False}, "and started again with 0"),
    "loses the tokens of refused requests": ("error", {"after_error": lambda _, unsent: []}, "which makes 2 tokens"),
    "accepts wrong drafts": (
        "output",
        {"verify": lambda self, text, draft: [*draft, self.target([*text, *draft])]},
        "another one than in the run of the same prompt without drafts",
    ),
    "tokens outside of the vocabulary": ("requests", {"target": lambda _, text: 100}, "the vocabulary has 100 tokens"),
    "durations of 0": ("step times", timing(0.0), "seconds=0.0"),
    "negative times of drafting": ("step times", timing(0.1, -0.1), "drafting_s=-0.1"),
    "steps with more sequences than tokens": (
        "step times", timing(0.1, sequences=lambda tokens: tokens + 1), "each sequence has a token",
    ),
    "steps without their draft tokens": (
        "step times", {"time_of": lambda _, tokens: StepTime(1, 1, 0.1)}, "the last step ran 1 tokens",
    ),
    "an invalid name": ("requests", {"engine": "a b"}, "hello.engine 'a b' is not a name of an engine"),
    "another protocol": ("hello", {"protocol": 2}, "hello.protocol is 2; this command tests protocol 3"),
}  # fmt: skip


@pytest.mark.parametrize(("check", "wrong", "sentence"), FAULTS.values(), ids=FAULTS)
def test_a_fault_is_found(check, wrong, sentence):
    found = failures(**wrong)
    assert sentence in found[check]


def test_an_engine_that_uses_no_drafts_does_not_pass():
    assert "drafts used" in failures(cut=lambda _, draft: [])


def test_outputs_of_an_engine_that_asks_for_no_drafts_are_not_tested():
    found = failures(most_drafted=0)
    assert (found["output"], found["drafts used"]) == (None, None)
    assert "finishes" not in found


def test_too_few_runs_are_not_enough():
    found = MiniEngine(EngineChecker()).run_all(times=2)
    assert found["lost sequence"] is None
    assert "counts" not in found


@pytest.fixture
def engine():
    engine = MiniEngine(EngineChecker())
    engine.connect()
    return engine


def test_a_malformed_request_is_refused(engine):
    response = engine.send(starts=[pb.Start(sequence_id=1, prompt=b"123")])
    assert "not a multiple of 4" in response.error.message
    assert "starts[0].prompt" in engine.checker.checks.failures["requests"]
    engine.checker.reply(engine.stream, b"\xff")
    assert engine.checker.reply(engine.stream, b"").HasField("drafts")


def test_a_stream_without_hello_is_found():
    engine = MiniEngine(EngineChecker())
    engine.stream = engine.checker.opened()
    engine.start(PROMPT)
    assert "no hello" in engine.checker.checks.failures["hello"]


def test_a_second_hello_or_start_is_found(engine):
    engine.send(hello=pb.Hello(protocol=3, client="x"))
    assert "other than the first" in engine.checker.checks.failures["hello"]
    engine.start(PROMPT)
    engine.last_id -= 1
    engine.start(PROMPT)
    assert "started while it was running" in engine.checker.checks.failures["starts"]


def test_a_sequence_that_was_never_started_is_found(engine):
    assert engine.send(finishes=[pb.Finish(sequence_id=9)]).lost_ids
    assert "names sequence 9, which is not running" in engine.checker.checks.failures["starts"]


def test_the_documentation_names_all_checks():
    text = (Path(__file__).parents[4] / "docs" / "integrating.md").read_text()
    assert [rule.name for rule in RULES if f"`{rule.name}`" not in text] == []
