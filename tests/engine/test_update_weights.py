"""After an update of the weights, an engine gives the outputs of an engine that was built with them."""

import threading
from contextlib import closing
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.scheduling.request import FinishReason
from engine.scheduling.turns import Turns
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.types import NO_LIMITS
from tests.engine.conftest import make_folder
from tests.engine.integrity import check_integrity
from tests.engine.test_core import outputs, requests

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=128, max_draft=6, kv_memory_mib=4)
KINDS = [
    "none", "ssd", "lookahead", "recycle", "self-int8", "draft-model", "mtp", "eagle", "medusa", "ssd+mtp+self-int8",
]  # fmt: skip
GREEDY, SAMPLED = requests(6), requests(6, temperature=1.0)


@pytest.fixture(scope="module")
def new_folder(tmp_path_factory):
    """A model of the shape of `model_folder` with other weights."""
    folder = tmp_path_factory.mktemp("models") / "new"
    make_folder(folder, seed=5)
    return folder


@pytest.fixture(scope="module")
def new(new_folder):
    return load_file(new_folder / "model.safetensors")


def engine_of(folder, kind="none", heads=None, config=CONFIG):
    """An engine with a model of its own."""
    model = load_model(folder)
    target = TargetInfo.from_model(model, config, folder)
    drafter = build_drafter(kind, DrafterConfig(capacity=10_000), target, draft_models=heads or {})
    return build_engine(pack(model), config, drafter)


@pytest.fixture(scope="module")
def expected(model_folder, new_folder):
    """Outputs of engines with the old and with the new weights, greedy and sampled."""
    found = {}
    for name, folder in (("old", model_folder), ("new", new_folder)):
        with closing(engine_of(folder)) as engine:
            found[name] = {"greedy": outputs(engine, GREEDY), "sampled": outputs(engine, SAMPLED)}
    for kind in ("greedy", "sampled"):
        assert all(old != new for old, new in zip(found["old"][kind], found["new"][kind], strict=True))
    return found


@pytest.fixture
def engine(model_folder):
    with closing(engine_of(model_folder)) as engine:
        yield engine


@pytest.mark.parametrize(
    ("kind", "in_flight"),
    [*((kind, number % 2) for number, kind in enumerate(KINDS)), ("none", 1)],
)
def test_outputs_are_those_of_an_engine_built_with_the_new_weights(
    model_folder, draft_folders, new, expected, kind, in_flight
):
    """The prompts are those before the update, so keys and values from the prefix cache would show."""
    config = replace(CONFIG, in_flight=in_flight)
    with closing(engine_of(model_folder, kind, draft_folders, config)) as engine:
        assert outputs(engine, GREEDY) == expected["old"]["greedy"]
        engine.update_weights(new, version=7)
        assert engine.version == 7
        for _ in range(2):  # The second run reuses pages of the first.
            assert outputs(engine, GREEDY) == expected["new"]["greedy"]
            assert outputs(engine, SAMPLED) == expected["new"]["sampled"]


def test_drafts_of_an_int8_copy_follow_the_weights(model_folder, new_folder):
    """The copy is exact enough that nearly all of its drafts are accepted, and random weights would accept few."""
    accepted = []
    for folder in (model_folder, new_folder):
        with closing(engine_of(folder, "self-int8")) as engine:
            engine.update_weights(new_folder)
            accepted.append(sum(each.accepted for each in engine.generate(GREEDY)))
    assert accepted[0] == accepted[1] > 100


def test_versions(engine, new):
    assert engine.version == 0
    for version, expected in ((None, 1), (9, 9), (None, 10), (3, 3)):
        engine.update_weights(new, version=version)
        assert engine.version == expected
    with pytest.raises(UserError, match="version"):
        engine.update_weights(new, version=-1)
    assert engine.version == 3


def test_weights_that_do_not_fit_change_nothing(model_folder, new, expected, tmp_path):
    (tmp_path / "cut.safetensors").write_bytes((model_folder / "model.safetensors").read_bytes()[:-1])
    shape = new | {"model.norm.weight": torch.ones(65)}
    with closing(engine_of(model_folder, "ssd")) as engine:
        for source in (shape, tmp_path / "cut.safetensors"):
            ids = [engine.add(request) for request in GREEDY]
            engine.step()
            with pytest.raises(UserError):
                engine.update_weights(source, version=2)
            assert list(finished(engine, ids)) == expected["old"]["greedy"]
        assert engine.version == 0


def finished(engine, ids):
    """Outputs of requests, after all requests have ended."""
    completions = {}
    while engine.has_work:
        completions.update(engine.step().finished)
        check_integrity(engine.scheduler)
    return [completions[each].tokens.tolist() for each in ids]


def begin(engine, steps):
    """Run the first steps of all requests; 4 run, 2 wait. Returns their ids and the tokens so far."""
    ids, tokens = [engine.add(request) for request in GREEDY], {}
    for _ in range(steps):
        for sequence_id, produced in engine.step().tokens.items():
            tokens.setdefault(sequence_id, []).extend(produced.tolist())
    assert len(engine.scheduler.running) == 4
    return ids, tokens


@pytest.mark.parametrize(("kind", "in_flight"), [("none", 1), ("ssd", 0), ("mtp", 1), ("medusa", 0)])
def test_requests_that_run_finish_with_the_old_weights(model_folder, draft_folders, new, expected, kind, in_flight):
    config = replace(CONFIG, in_flight=in_flight)
    with closing(engine_of(model_folder, kind, draft_folders, config)) as engine:
        ids, tokens = begin(engine, 4)
        assert tokens
        engine.update_weights(new)
        assert engine.version == 1
        assert not engine.scheduler.running
        assert finished(engine, ids) == of_update(expected)
        assert outputs(engine, GREEDY) == expected["new"]["greedy"]


def of_update(expected):
    """Return the outputs of requests of which four ran before an update."""
    return expected["old"]["greedy"][:4] + expected["new"]["greedy"][4:]


def test_preempted_requests_count_as_begun(engine, new, expected):
    ids, _ = begin(engine, 4)
    for sequence in reversed(engine.scheduler.running):
        engine.scheduler._preempt(sequence)
    engine.update_weights(new)
    assert finished(engine, ids) == of_update(expected)


def test_an_update_between_the_steps_of_generate(engine, new, expected):
    """Requests that were cancelled before keep their completion."""
    steps = []

    def observe(report):
        steps.append(report)
        if len(steps) == 2:
            engine.cancel(min(report.tokens))
        if len(steps) == 4:
            engine.update_weights(new)

    cancelled, *others = engine.generate(GREEDY, observe)
    old, new = expected["old"]["greedy"], expected["new"]["greedy"]
    assert cancelled.finish_reason is FinishReason.ABORT
    assert cancelled.tokens.tolist() == old[0][: len(cancelled.tokens)]
    for index, completion in enumerate(others, 1):
        tokens = completion.tokens.tolist()
        # The cancelled request makes room for the fifth.
        assert tokens == (old if index < 5 else new)[index]


def test_an_update_within_an_update_is_refused(engine, new):
    begin(engine, 2)
    problems = []

    def observe(_report):
        with pytest.raises(UserError, match="another update of the weights is under way"):
            engine.update_weights(new)
        problems.append(1)

    engine.update_weights(new, observe=observe)
    assert problems
    assert engine.version == 1


def test_an_update_from_another_thread_takes_place_between_steps(model_folder, new, expected):
    """The update is asked for while a step runs."""
    is_stepping, is_asked = threading.Event(), threading.Event()

    class Waiting(NoDrafter):
        limits = NO_LIMITS
        steps = 0

        def draft(self, progress):
            self.steps += 1
            if self.steps == 3:
                is_stepping.set()
                assert is_asked.wait(60)
            return super().draft(progress)

    model = load_model(model_folder)
    with closing(build_engine(model, CONFIG, Waiting())) as engine:

        def update():
            assert is_stepping.wait(60)
            # From here on the lock is asked for; the step that holds it waits for this.
            engine._turns._next.acquire()
            is_asked.set()
            try:
                engine.update_weights(new, version=4)
            finally:
                engine._turns._next.release()

        thread = threading.Thread(target=update)
        thread.start()
        tokens = [completion.tokens.tolist() for completion in engine.generate(GREEDY)]
        thread.join(60)
        assert not thread.is_alive()
        assert engine.version == 4
        assert tokens == of_update(expected)


def test_a_waiting_thread_gets_the_lock_before_the_thread_that_had_it():
    turns, order = Turns(), []

    def wait():
        with turns:
            order.append("other")

    thread = threading.Thread(target=wait)
    with turns, turns:
        thread.start()
        while turns._next.acquire(blocking=False):
            turns._next.release()
        order.append("first")
    with turns:
        order.append("last")
    thread.join(60)
    assert order == ["first", "other", "last"]
