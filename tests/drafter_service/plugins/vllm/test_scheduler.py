"""The schedulers over a fake of vLLM's: what a run in vLLM itself does not show.

`test_conformance.py` runs them in the host's own classes, and tests/hosts in vLLM 0.32: these have the
tests of outputs, preemption, prefix caches, grammars, adapters, lost sidecars, and of what is learned.
"""

import json
import pickle
from threading import Event
from types import SimpleNamespace

import pytest

import drafter_service.plugins.vllm as plugin
from drafter_service.client.identity import fingerprint, process_name
from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.vllm.engine import LOG, OptionsReader, end_of, engine_name, padding_of, settings_of
from drafter_service.plugins.vllm.scheduler import REPORT, SchedulerWithDrafts, SchedulerWithReports, StepReport
from drafter_service.plugins.vllm.variants import Choice, Variant
from ssd.errors import UserError
from tests.drafter_service.plugins.helpers import lines_of, plain, use_equal_steps
from tests.drafter_service.plugins.vllm.fake_vllm import FakeScheduler, Request, RequestStatus, vllm_config
from tests.drafter_service.raw import eventually

PROMPT = [1, 2, 3, 4, 5, 1, 2, 3]


class Scheduler(SchedulerWithDrafts, FakeScheduler):
    def step(self):
        output = self.schedule()
        self.update_from_output(output)
        return output

    def run(self, *requests):
        for request in requests:
            self.add_request(request)
        while self.requests:
            self.step()


class ReportingScheduler(SchedulerWithReports, FakeScheduler):
    pass


@pytest.fixture
def log():
    with lines_of(LOG) as lines:
        yield lines


@pytest.fixture(autouse=True)
def choose(monkeypatch):
    """Let the fake be of a tested version, with an embedded drafter; return a function that changes the choice."""

    def choose(*choice, **more):
        monkeypatch.setattr("drafter_service.plugins.vllm.engine.choose", lambda _: Choice(*choice, **more))

    choose(Variant.V1_SCHEDULER, "")
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "embedded", "capacity": 20000}')
    use_equal_steps(monkeypatch, "vllm.scheduler")
    return choose


@pytest.fixture
def scheduler(log):
    """Return a scheduler in which a request has run one step."""
    scheduler = Scheduler(vllm_config())
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    yield scheduler
    scheduler.run()
    counters = scheduler.ssd_session.counters
    assert counters.failures == 0
    assert counters.verified <= scheduler.verified
    assert counters.accepted <= scheduler.accepted
    assert all(request.output == plain(request.prompt, request.max_tokens) for request in scheduler.freed)
    scheduler.shutdown()
    assert scheduler.is_shut_down


def test_requests_in_the_middle_of_their_prompt_or_of_a_step_have_no_draft(scheduler):
    request = scheduler.requests["a"]
    for name, value in (("is_prefill_chunk", True), ("num_in_flight_tokens", 1)):
        setattr(request, name, value)
        assert not scheduler.step().scheduled_spec_decode_tokens
        setattr(request, name, 0)
    assert scheduler.step().scheduled_spec_decode_tokens


def test_the_host_limits_the_drafts_of_the_next_step(scheduler):
    scheduler.vllm_config.speculative_config.num_speculative_tokens = 2
    scheduler.running[0].num_in_flight_tokens = 1
    scheduler.step()  # It tells the limit of the next one.
    scheduler.run()  # The fake refuses longer drafts.
    assert scheduler.accepted > 0


def test_a_failure_costs_drafts_only(scheduler, log, monkeypatch):
    session = scheduler.ssd_session
    monkeypatch.setattr(session, "draft", lambda *_: 1 // 0)
    scheduler.run()
    assert [line for line in log if "ZeroDivisionError" in line]
    session.counters.failures = 0


def test_without_a_variant_the_host_runs_as_without_the_plug_in(log, choose):
    choose(Variant.NONE, "too new")
    scheduler = Scheduler(vllm_config())
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["a"], draft_token_ids=[[9]]))
    assert scheduler.step().scheduled_spec_decode_tokens == {"a": [9]}
    scheduler.run()
    scheduler.shutdown()
    assert log == ["ssd-drafter: too new; serving without drafts"]


@pytest.mark.parametrize("scheduler_class", [Scheduler, ReportingScheduler])
def test_what_cannot_work_is_refused(choose, monkeypatch, scheduler_class):
    choose(Variant.NONE, "the engine is synchronous", is_error=True)
    with pytest.raises(ValueError, match="ssd-drafter: the engine is synchronous"):
        scheduler_class(vllm_config())
    choose(Variant.V1_SCHEDULER, "")
    monkeypatch.setenv("SSD_PLUGIN", '{"deadline_s": "soon"}')
    with pytest.raises(UserError, match="SSD_PLUGIN: deadline_s"):
        Scheduler(vllm_config())
    with pytest.raises(AttributeError, match="no attribute 'Drafter'"):
        plugin.Drafter  # noqa: B018


class Clock:
    """A clock that is advanced by what the host does."""

    now = 50.0

    def __call__(self):
        return self.now


def test_a_step_lasts_from_the_end_of_drafting_to_the_next_request_for_drafts(scheduler, monkeypatch):
    clock, steps = Clock(), []
    monkeypatch.setattr("drafter_service.plugins.vllm.scheduler.perf_counter", clock)
    session = scheduler.ssd_session
    draft = session.draft
    scheduler.step()
    session.record_step = lambda *step: steps.append(step)

    def slow_draft(*args):
        clock.now += 100  # It is not part of the step.
        return draft(*args)

    session.draft = slow_draft
    sizes = []
    for seconds in (2.0, 3.0):
        output = scheduler.schedule()
        sizes.append(output.total_num_scheduled_tokens)
        clock.now += seconds
        scheduler.update_from_output(output)
        clock.now += 0.5
    scheduler.run()
    clock.now += 1000  # No request was left: this is not a step.
    scheduler.run(Request("b", PROMPT, max_tokens=1))
    assert steps[1:3] == [(sizes[0], 1, 2.5), (sizes[1], 1, 3.5)]
    assert max(step[2] for step in steps) < 10


def test_steps_in_flight_at_once_are_not_measured(scheduler):
    steps = []
    scheduler.ssd_session.record_step = lambda *step: steps.append(step)
    first, second = scheduler.schedule(), scheduler.schedule()
    steps.clear()
    scheduler.update_from_output(first)
    scheduler.update_from_output(second)
    scheduler.step()
    assert steps == []


def test_the_drafter_is_told_of_what_else_runs_in_the_step(scheduler):
    """Requests without drafts, and waiting ones while the host admits some."""
    calls, draft = [], scheduler.ssd_session.draft
    scheduler.ssd_session.draft = lambda *args: calls.append(args[1:]) or draft(*args)
    scheduler.add_request(Request("b", PROMPT))
    scheduler.step()
    scheduler.ssd_session.finish("b", None)  # It has no drafts any more.
    scheduler.step()
    waiting = Request("c", PROMPT, status=RequestStatus.PREEMPTED)
    scheduler.add_request(waiting)
    scheduler.step()  # No request began in the step before.
    assert calls == [(len(PROMPT), 0), (0, 1), (0, 1)]


@pytest.mark.parametrize("count", [0, 1, 256, 257, 1000])
def test_a_limited_number_of_sizes_of_cuda_graphs_is_reported(count):
    graphs = SimpleNamespace(
        cudagraph_mode=SimpleNamespace(name="FULL"), cudagraph_capture_sizes=[*range(1, count + 1)]
    )
    sizes = padding_of(graphs).sizes
    assert len(sizes) == min(count, 256) or count // 2 - 256 < len(sizes) <= 256
    assert list(sizes) == sorted(sizes)
    assert not sizes or sizes[-1] == count
    assert padding_of(SimpleNamespace(cudagraph_mode=None)).sizes == ()


@pytest.mark.parametrize(
    ("given", "rank", "name"),
    [("", 0, "{process}"), ("", 2, "{process}:dp2"), ("chat", 0, "chat"), ("x" * 128, 10, "x" * 123 + ":dp10")],
)
def test_ranks_of_data_parallelism_have_names_of_their_own(given, rank, name):
    assert engine_name(given, SimpleNamespace(data_parallel_index=rank)) == name.format(process=process_name())


@pytest.mark.parametrize("variant", [Variant.V2_WORKER, Variant.NONE])
def test_the_asynchronous_scheduler_reports_options_and_ends(choose, variant):
    choose(variant, "because")
    scheduler = ReportingScheduler(vllm_config())
    scheduler.add_request(Request("a", PROMPT, cache_salt="s"))
    scheduler.add_request(Request("b", PROMPT, prompt_embeds=object()))
    reports = [getattr(pickle.loads(pickle.dumps(scheduler.schedule())), REPORT, None)]
    scheduler.finish_requests("a", RequestStatus.FINISHED_STOPPED)
    reports += [getattr(scheduler.schedule(), REPORT, None) for _ in range(2)]
    if variant is Variant.NONE:
        assert reports == [None] * 3
        return
    assert reports == [
        StepReport({"a": RequestOptions(max_tokens=30, salt="s")}, {}),
        StepReport({}, {"a": (End.FINISHED, len(PROMPT))}),
        StepReport({}, {}),
    ]


# --- Requests and models


def test_each_finished_status_has_an_end():
    ends = {status.name: end_of(status.name) for status in RequestStatus if status > RequestStatus.PREEMPTED}
    assert ends == {
        "FINISHED_STOPPED": End.FINISHED,
        "FINISHED_LENGTH_CAPPED": End.FINISHED,
        "FINISHED_REPETITION": End.FINISHED,
        "FINISHED_ABORTED": End.ABORTED,
        "FINISHED_IGNORED": End.CANCELLED,
        "FINISHED_ERROR": End.CANCELLED,
    }


def test_options_of_a_request():
    request = Request("a", [1, 2], max_tokens=7, cache_salt="s", session_id="chat")
    reader = OptionsReader(print)
    assert reader.options_of(request) == RequestOptions(max_tokens=7, salt="s", session="chat")
    request.sampling_params.stop = ["\n"]
    assert reader.options_of(request).has_stop_strings
    for name, value in (("prompt_embeds", object()), ("sampling_params", None)):
        assert reader.options_of(Request("a", [1, 2], **{name: value})) is None


def test_an_adapter_is_identified_by_its_file_and_has_no_drafts_while_it_is_read(tmp_path, monkeypatch):
    file, may_read, warnings = tmp_path / "adapter_model.safetensors", Event(), []
    file.write_bytes(b"weights")
    monkeypatch.setattr(
        "drafter_service.plugins.vllm.engine.fingerprint", lambda path: may_read.wait(10) and fingerprint(path)
    )
    reader = OptionsReader(warnings.append)
    for path, wanted in ((str(tmp_path), fingerprint(file)), ("/nonexistent", "a:/nonexistent")):
        request = Request("a", [1, 2], lora_request=SimpleNamespace(lora_name="a", lora_path=path))
        assert may_read.is_set() or reader.options_of(request) is None
        may_read.set()
        eventually(lambda request=request: reader.options_of(request) is not None)
        assert reader.options_of(request).adapter == wanted
    assert len(warnings) == 1


def test_a_model_is_identified_by_its_tokenizer_and_folder(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 4096}}))
    config = SimpleNamespace(model=str(tmp_path), revision=None, get_vocab_size=lambda: 4096)
    identity = settings_of(config, pytest.fail).model
    assert (identity.name, identity.tokenizer, identity.vocab_size) == (tmp_path.name, fingerprint(tmp_path), 4096)
