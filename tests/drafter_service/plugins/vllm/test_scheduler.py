"""The scheduler over a fake of vLLM's; tests/hosts runs the same plug-in in vLLM itself."""

import logging
from types import SimpleNamespace

import pytest

import drafter_service.plugins.vllm as plugin
from drafter_service.client.identity import process_name
from drafter_service.plugins.vllm import NullProposer
from drafter_service.plugins.vllm.engine_session import LOG, engine_name, padding_of
from drafter_service.plugins.vllm.scheduler import SchedulerWithDrafts
from drafter_service.plugins.vllm.variants import Choice, Variant
from ssd.errors import UserError
from tests.drafter_service.plugins.equal_steps import use_equal_steps
from tests.drafter_service.plugins.vllm.fake_vllm import (
    FakeScheduler,
    Request,
    RequestStatus,
    target,
    vllm_config,
)
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

    @property
    def corpus(self):
        corpus = self._session._namespaces.find("", "").drafter.corpus
        corpus.refresh()
        return corpus


@pytest.fixture
def log():
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    LOG.logger.addHandler(handler)
    LOG.setLevel(logging.WARNING)  # vLLM itself, where it is installed, may have set another one above it.
    yield lines
    LOG.setLevel(logging.NOTSET)
    LOG.logger.removeHandler(handler)


@pytest.fixture(autouse=True)
def tested_version(monkeypatch):
    """Let the fake be of a tested version, with an embedded drafter."""
    choice = Choice(Variant.V1_SCHEDULER, "")
    monkeypatch.setattr("drafter_service.plugins.vllm.engine_session.choose", lambda _: choice)
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "embedded", "capacity": 20000}')
    use_equal_steps(monkeypatch, "vllm.scheduler")


@pytest.fixture
def scheduler(log):
    scheduler = Scheduler(vllm_config())
    yield scheduler
    counters = scheduler._session.counters
    assert counters.failures == 0
    assert counters.verified <= scheduler.verified
    assert counters.accepted <= scheduler.accepted
    scheduler.shutdown()
    assert scheduler.is_shut_down


def output_of(prompt, tokens):
    """Return the output of plain decoding."""
    text = list(prompt)
    for _ in range(tokens):
        text.append(target(text))
    return text[len(prompt) :]


def test_outputs_are_identical_and_take_fewer_steps_the_second_time(scheduler):
    prompts = [PROMPT, PROMPT[2:], [7, *PROMPT]]
    steps = []
    for turn in range(2):
        before = scheduler.steps
        for at, prompt in enumerate(prompts):
            scheduler.run(Request(f"{turn}-{at}", prompt))
            scheduler.corpus  # noqa: B018  # It indexes what was learned.
        steps.append(scheduler.steps - before)
    assert [request.output for request in scheduler.freed] == [output_of(prompt, 30) for prompt in prompts] * 2
    assert steps[1] < steps[0] / 2 < 3 * 30 / 2
    counters = scheduler._session.counters
    assert (counters.verified, counters.accepted) == (scheduler.verified, scheduler.accepted)


def test_batches_with_preemption_and_a_budget_are_identical(scheduler):
    scheduler.budget = 5
    for name in "abc":
        scheduler.add_request(Request(name, [ord(name) % 7, *PROMPT]))
    for at in range(200):
        if at % 3 == 1 and scheduler.running:
            scheduler.preempt(scheduler.running[at % len(scheduler.running)].request_id)
        if scheduler.requests:
            scheduler.step()
    assert len(scheduler.freed) == 3
    assert all(request.output == output_of(request.prompt, 30) for request in scheduler.freed)
    assert scheduler.accepted > 0


def test_the_padding_of_new_requests_is_not_counted(scheduler):
    scheduler.padded = {"a"}
    scheduler.add_request(Request("a", PROMPT))
    assert scheduler.step().num_invalid_spec_tokens == {"a": 8}
    assert scheduler.step().num_invalid_spec_tokens is None
    assert scheduler._session.counters.verified == 0


def test_a_request_that_the_host_schedules_anew_continues(scheduler):
    """The V2 model runner gets preempted requests as new ones."""
    scheduler.add_request(Request("a", PROMPT))
    output = scheduler.step()
    assert [data.req_id for data in output.scheduled_new_reqs] == ["a"]
    scheduler._record_scheduled(scheduler._session, output)
    assert scheduler._session._sequences == 1
    scheduler.run()


def test_requests_in_the_middle_of_their_prompt_or_of_a_step_have_no_draft(scheduler):
    request = Request("a", PROMPT, is_prefill_chunk=True)
    scheduler.add_request(request)
    for _ in range(2):
        assert not scheduler.step().scheduled_spec_decode_tokens
    request.is_prefill_chunk = False
    scheduler.update_from_output(scheduler.schedule())
    request.num_in_flight_tokens = 1
    assert not scheduler.schedule().scheduled_spec_decode_tokens
    request.num_in_flight_tokens = 0
    assert scheduler.schedule().scheduled_spec_decode_tokens


@pytest.mark.parametrize(
    ("status", "stop", "is_learned"),
    [
        (RequestStatus.FINISHED_STOPPED, [], True),
        (RequestStatus.FINISHED_ABORTED, [], False),
        (RequestStatus.FINISHED_ABORTED, ["\n"], True),
        (RequestStatus.FINISHED_ERROR, ["\n"], False),
    ],
)
def test_what_ended_a_request_decides_whether_it_is_learned(scheduler, status, stop, is_learned):
    scheduler.add_request(Request("a", PROMPT, sampling_params=SimpleNamespace(stop=stop, extra_args=None)))
    for _ in range(5):
        scheduler.step()
    scheduler.finish_requests("a", status)
    assert (scheduler.corpus.tokens > 0) == is_learned
    assert "a" not in scheduler._session


@pytest.mark.parametrize("extras", [{"ssd_private": True}, {"ssd_private": 1, "other": "x"}, {"ssd_max_draft": "many"}])
def test_extra_arguments_of_a_request_are_options(scheduler, log, extras):
    scheduler.run(Request("a", PROMPT, sampling_params=SimpleNamespace(stop=[], extra_args=extras)))
    assert scheduler.corpus.tokens == 0
    assert any("ssd_max_draft must be of type int" in line for line in log) == ("ssd_max_draft" in extras)


def test_salts_and_adapters_have_corpora_of_their_own(scheduler, log):
    lora = SimpleNamespace(lora_name="a", lora_path="/nonexistent")
    eventually(lambda: scheduler._options.fingerprint(lora) is not None)
    scheduler.run(Request("a", PROMPT), Request("b", PROMPT, cache_salt="s"), Request("c", PROMPT, lora_request=lora))
    assert set(scheduler._session._namespaces._open) == {("", ""), ("", "s"), ("a:/nonexistent", "")}
    assert any("identified by its name and path" in line for line in log)


@pytest.mark.parametrize("prevented", [{"prompt_embeds": object()}, {"sampling_params": None}])
def test_requests_without_tokens_are_left_to_the_host(scheduler, prevented):
    scheduler.run(Request("a", PROMPT, **prevented))
    assert scheduler._session.counters.steps == 0
    assert scheduler.freed[0].output == output_of(PROMPT, 30)


def test_drafts_that_the_grammar_forbids_are_cut(scheduler):
    request = Request("a", PROMPT, use_structured_output=True)
    scheduler.add_request(request)
    scheduler.step()
    offered = []
    while scheduler.requests:
        drafts = scheduler.step().scheduled_spec_decode_tokens.get("a", [])
        offered.append(len(drafts))
        assert 6 not in drafts
    assert request.output == output_of(PROMPT, 30)
    assert max(offered) > 1


def test_the_host_limits_the_drafts_of_the_next_step(scheduler):
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    scheduler._max_draft = 2
    scheduler.vllm_config.speculative_config.num_speculative_tokens = 2
    while scheduler.requests:
        scheduler.step()  # The fake refuses longer drafts.
    assert scheduler.accepted > 0


def test_a_failure_costs_drafts_only(log, monkeypatch):
    scheduler = Scheduler(vllm_config())
    monkeypatch.setattr(scheduler, "_offer_drafts", lambda session: 1 // 0)
    scheduler.run(Request("a", PROMPT))
    assert scheduler.freed[0].output == output_of(PROMPT, 30)
    assert [line for line in log if "ZeroDivisionError" in line]
    scheduler.shutdown()


def test_without_a_variant_the_host_runs_as_without_the_plug_in(log, monkeypatch):
    monkeypatch.setattr("drafter_service.plugins.vllm.engine_session.choose", lambda _: Choice(Variant.NONE, "too new"))
    scheduler = Scheduler(vllm_config())
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    scheduler.update_draft_token_ids(SimpleNamespace(req_ids=["a"], draft_token_ids=[[9]]))
    assert scheduler.step().scheduled_spec_decode_tokens == {"a": [9]}
    scheduler.run()
    scheduler.shutdown()
    assert log == ["ssd-drafter: too new; serving without drafts"]


def test_a_configuration_that_cannot_work_is_refused(monkeypatch):
    choice = Choice(Variant.NONE, "add --no-async-scheduling", is_error=True)
    monkeypatch.setattr("drafter_service.plugins.vllm.engine_session.choose", lambda _: choice)
    with pytest.raises(ValueError, match="add --no-async-scheduling"):
        Scheduler(vllm_config())


def test_invalid_settings_are_refused(monkeypatch):
    monkeypatch.setenv("SSD_PLUGIN", '{"deadline_s": "soon"}')
    with pytest.raises(UserError, match="SSD_PLUGIN: deadline_s"):
        Scheduler(vllm_config())


def test_without_a_sidecar_requests_are_served_and_one_line_says_so(log, monkeypatch):
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "unix:/nonexistent/drafter.sock"}')
    scheduler = Scheduler(vllm_config())
    scheduler.run(Request("a", PROMPT))
    assert scheduler.freed[0].output == output_of(PROMPT, 30)
    assert scheduler._session.counters.failures == 0
    eventually(lambda: log)
    scheduler.shutdown()
    assert len(log) == 1
    assert log[0].startswith("ssd-drafter: no connection to the drafter at unix:/nonexistent/drafter.sock")


def test_the_proposer_of_the_workers_proposes_nothing():
    proposer = NullProposer(vllm_config())
    proposer.load_model(object())
    assert proposer.propose([[1], [], [2, 3]], None, None, slot_mappings=None) == [[], [], []]


def test_the_module_has_no_other_names():
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
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    session = scheduler._session
    draft = session.draft
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
    while scheduler.requests:
        scheduler.step()
    clock.now += 1000  # No request was left: this is not a step.
    scheduler.run(Request("b", PROMPT, max_tokens=1))
    assert steps[1:3] == [(sizes[0], 1, 2.5), (sizes[1], 1, 3.5)]
    assert max(step[2] for step in steps) < 10


def test_steps_in_flight_at_once_are_not_measured(scheduler):
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    steps = []
    scheduler._session.record_step = lambda *step: steps.append(step)
    first, second = scheduler.schedule(), scheduler.schedule()
    steps.clear()
    scheduler.update_from_output(first)
    scheduler.update_from_output(second)
    scheduler.schedule()
    assert steps == []


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


def test_requests_without_drafts_are_sequences_of_the_step(scheduler):
    for name in "ab":
        scheduler.add_request(Request(name, PROMPT))
    scheduler.step()
    scheduler._session.finish("b", None)  # It has no drafts any more.
    calls, draft = [], scheduler._session.draft
    scheduler._session.draft = lambda *args: calls.append(args[1:]) or draft(*args)
    scheduler.step()
    assert calls == [(0, 1)]


def test_waiting_requests_count_only_while_the_host_admits_some(scheduler):
    scheduler.add_request(Request("a", PROMPT))
    scheduler.step()
    waiting = Request("b", PROMPT, status=RequestStatus.RUNNING)
    scheduler.waiting = [waiting]
    assert scheduler._expected_prompt_tokens(1) == len(PROMPT)
    scheduler._is_admitting = False
    assert scheduler._expected_prompt_tokens(1) == 0
    scheduler.waiting = []


@pytest.mark.parametrize(
    ("given", "rank", "name"),
    [
        ("", 0, "{process}"),
        ("", 2, "{process}:dp2"),
        ("chat", 0, "chat"),
        ("x" * 128, 10, "x" * 123 + ":dp10"),
    ],
)
def test_ranks_of_data_parallelism_have_names_of_their_own(given, rank, name):
    assert engine_name(given, SimpleNamespace(data_parallel_index=rank)) == name.format(process=process_name())
