"""The plug-in's schedulers in vLLM 0.33's own classes, in steps that other tests do not show; see `host.py`.

`test_conformance.py` has the tests of outputs and of what is learned; tests/hosts has those in vLLM 0.32.
"""

from pathlib import Path

import pytest

from drafter_service.client.identity import model_identity
from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.vllm.engine import LOG, OptionsReader, end_of, settings_of
from drafter_service.plugins.vllm.scheduler import REPORT
from drafter_service.plugins.vllm.variants import ASYNC_SCHEDULER
from ssd.errors import UserError
from tests.drafter_service.plugins.helpers import lines_of, plain
from tests.drafter_service.plugins.vllm.host import MODEL, V1, Engine, vllm_config

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]


@pytest.fixture(autouse=True)
def _v1(vllm, monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")


@pytest.fixture
def log():
    with lines_of(LOG) as lines:
        yield lines


@pytest.fixture
def engine(monkeypatch, log):
    """Return an engine in which a request has run one step."""
    engine = Engine(vllm_config(speculation=V1), monkeypatch, blocks=9)
    engine.add("a", PROMPT)
    engine.step()
    yield engine
    engine.run()
    assert engine.scheduler.ssd_session.counters.failures == 0
    assert engine.outputs["a"] == plain(PROMPT)
    engine.scheduler.shutdown()


def test_requests_in_the_middle_of_their_prompt_have_no_draft(monkeypatch):
    engine = Engine(vllm_config(speculation=V1, budget=24), monkeypatch)
    engine.add("a", PROMPT * 7)
    session, asked = engine.scheduler.ssd_session, []
    draft = session.draft
    session.draft = lambda texts, *more: asked.append(len(texts)) or draft(texts, *more)
    for _ in range(4):
        engine.step()
    assert asked == [0, 0, 0, 1]  # The prompt runs in three steps.
    assert engine.run() == [plain(PROMPT * 7)]
    engine.scheduler.shutdown()


def test_a_failure_costs_drafts_only(engine, log, monkeypatch):
    session = engine.scheduler.ssd_session
    monkeypatch.setattr(session, "draft", lambda *_: 1 // 0)
    engine.run()
    assert [line for line in log if "ZeroDivisionError" in line]
    session.counters.failures = 0


def test_without_a_variant_the_host_runs_as_without_the_plug_in(log, monkeypatch):
    from vllm.v1.outputs import DraftTokenIds

    engine = Engine(vllm_config(speculation={"method": "ngram"}), monkeypatch)
    engine.add("a", PROMPT)
    engine.step()
    engine.scheduler.update_draft_token_ids(DraftTokenIds(["a"], [[9]]))
    engine.step()
    assert engine.run() == [plain(PROMPT)]
    assert (engine.lengths, engine.scheduler.ssd_session) == ({1}, None)
    engine.scheduler.shutdown()
    engine = Engine(vllm_config(speculation=V1, scheduler=ASYNC_SCHEDULER, is_asynchronous=True), monkeypatch)
    engine.add("a", PROMPT)
    assert not hasattr(engine.scheduler.schedule(), REPORT)
    assert [line.endswith("; serving without drafts") for line in log] == [True] * 2


def test_settings_that_cannot_work_are_refused(monkeypatch):
    for scheduler, is_asynchronous in (({}, True), ({"scheduler": ASYNC_SCHEDULER}, False)):
        config = vllm_config(speculation=V1, is_asynchronous=is_asynchronous, **scheduler)
        with pytest.raises(ValueError, match="ssd-drafter: the "):
            Engine(config, monkeypatch)
    monkeypatch.setenv("SSD_PLUGIN", '{"deadline_s": "soon"}')
    with pytest.raises(UserError, match="SSD_PLUGIN: deadline_s"):
        Engine(vllm_config(speculation=V1), monkeypatch)


class Clock:
    """A clock that is advanced by what the host does."""

    now = 50.0

    def __call__(self):
        return self.now


def test_a_step_lasts_from_the_end_of_drafting_to_the_next_request_for_drafts(engine, monkeypatch):
    clock, steps, sizes = Clock(), [], []
    monkeypatch.setattr("drafter_service.plugins.vllm.scheduler.perf_counter", clock)
    session = engine.scheduler.ssd_session
    draft = session.draft
    engine.step()
    session.record_step = lambda *step: steps.append(step)

    def slow_draft(*args):
        clock.now += 100  # It is not part of the step.
        return draft(*args)

    session.draft = slow_draft
    for seconds in (2.0, 3.0):
        output = engine.scheduler.schedule()
        sizes.append(output.total_num_scheduled_tokens)
        clock.now += seconds
        engine.process(output, engine.execute_v1(output))
        clock.now += 0.5
    engine.run()
    clock.now += 1000  # No request was left: this is not a step.
    engine.add("b", PROMPT, 1)
    engine.run()
    assert steps[1:3] == [(sizes[0], 1, 2.5), (sizes[1], 1, 3.5)]
    assert max(step[2] for step in steps) < 10


def test_steps_in_flight_at_once_are_not_measured(engine):
    steps = []
    engine.scheduler.ssd_session.record_step = lambda *step: steps.append(step)
    outputs = [engine.scheduler.schedule() for _ in range(2)]
    steps.clear()
    for output in outputs:
        engine.process(output, engine.execute_v1(output))
    engine.step()
    assert steps == []


def test_the_drafter_is_told_of_what_else_runs_in_the_step(engine):
    """Requests without drafts, and waiting ones while the host admits some."""
    session, calls = engine.scheduler.ssd_session, []
    draft = session.draft
    session.draft = lambda *args: calls.append(args[1:3]) or draft(*args)
    engine.add("b", PROMPT)
    engine.step()
    session.finish("b", None)  # It has no drafts any more.
    engine.step()
    engine.add("c", PROMPT * 28)  # There are too few pages for it.
    engine.step()
    assert calls == [(len(PROMPT), 0), (0, 1), (0, 1)]


def test_the_host_limits_the_drafts_of_the_next_step(monkeypatch):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")  # The other one has no such limit.
    by_requests = {"num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 1, 8], [2, 8, 2]]}
    engine = Engine(vllm_config(speculation=by_requests), monkeypatch)
    longest = []
    for names in ("ab", "c"):
        engine.lengths.clear()
        for name in names:
            engine.add(name, PROMPT)
        engine.run()
        longest.append(max(engine.lengths))
    assert (longest, list(engine.outputs.values())) == ([2, 8], [plain(PROMPT)] * 3)
    engine.scheduler.shutdown()


# --- Requests and models


def test_each_finished_status_has_an_end():
    from vllm.v1.request import RequestStatus

    ends = {status.name: end_of(status.name) for status in RequestStatus if status > RequestStatus.PREEMPTED}
    assert ends == {
        "FINISHED_STOPPED": End.FINISHED,
        "FINISHED_LENGTH_CAPPED": End.FINISHED,
        "FINISHED_REPETITION": End.FINISHED,
        "FINISHED_ABORTED": End.ABORTED,
        "FINISHED_IGNORED": End.CANCELLED,
        "FINISHED_ERROR": End.CANCELLED,
    }


def test_options_of_a_request(engine):
    engine.add("b", PROMPT, 7, cache_salt="s", session_id="chat", stop=["x"])
    request, reader = engine.scheduler.requests["b"], OptionsReader(print)
    expected = RequestOptions(max_tokens=7, has_stop_strings=True, salt="s", session="chat")
    assert reader.options_of(request) == expected
    request.prompt_embeds = object()
    assert reader.options_of(request) is None
    request.prompt_embeds = None


def test_a_model_is_identified_by_its_files():
    assert settings_of(vllm_config(speculation=V1).model_config, pytest.fail).model == model_identity(Path(MODEL))
