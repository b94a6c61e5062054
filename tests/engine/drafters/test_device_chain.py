"""Drafts that heads make on the device: outputs, and drafts against the naive twin, with random weights."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from engine.attention.base import StepShape
from engine.attention.plain import PlainAttention
from engine.config import EngineConfig
from engine.drafters.device_chain import FixedChain
from engine.drafters.draft_forward import DraftForward
from engine.drafters.slots import SlotWriter
from engine.engine import build_engine
from engine.executor.device_state import DeviceState
from engine.executor.fixed_step import FixedStep, Kind
from engine.executor.graph import GraphStep
from engine.executor.runner import Runner
from engine.executor.transfer import CopyStream
from engine.models.loader import load_model
from engine.sampling.noise import row_settings, sample_tokens
from engine.scheduling.kernels import FIRST_TOKEN
from engine.scheduling.pages import PagePool
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.scheduling.scheduler import Scheduler
from tests.engine.chain import AtRandom
from tests.engine.drafters import networks
from tests.engine.drafters.heads import HEADS, make_head, naive_logits
from tests.engine.drafters.networks import TOLERANCE, new_drafter, tokens_of
from tests.engine.drafters.test_networks import without_page_states
from tests.engine.integrity import check_integrity
from tests.engine.steps import each_of

CONFIG = EngineConfig(max_sequences=4, max_step_tokens=64, max_draft=6, page_size=16, kv_memory_mib=1, in_flight=1)
KINDS = [kind for kind in HEADS if kind != "self"]
DEPTH = 4
COUPLED = 30.0
"""A temperature at which the noise that the target and its drafter share decides most tokens, so that most drafts are
accepted."""


class Recorder:
    """Records the drafts that the device made, with the text before each."""

    def __init__(self, monkeypatch):
        self.drafts = []
        result = GraphStep.result

        def recording(step):
            found = result(step)
            plan = found.plan
            for index in np.flatnonzero((found.verified > 0) & plan.still_runs[: plan.producers]).tolist():
                [sequence], draft = plan.table.of(plan.rows[[index]]), plan.drafts.batch.tokens[found.draft_of(index)]
                self.drafts.append((sequence.tokens.copy(), draft, sequence.request.sampling))
            return found

        monkeypatch.setattr(GraphStep, "result", recording)

    def right(self, head, target, count=50):
        """For some of the drafts, the number of tokens before the first that the twin does not draft, and the number
        of tokens."""
        for text, draft, sampling in self.drafts[:: max(1, len(self.drafts) // count)]:
            expected = naive_drafts(head, target, text, draft, sampling)
            yield int(np.append(draft == expected, False).argmin()), len(draft)

    def are_right(self, head, target):
        return all(right == length for right, length in self.right(head, target))


def naive_drafts(head, target, text, draft, sampling):
    """The tokens that the head drafts after the text and after each token of the draft but the last, uint32 [k]."""
    logits = naive_logits(head, target, text, draft[:-1])
    if head.draft_vocabulary is not None:
        whole = torch.full((len(logits), target.config.vocab_size), -torch.inf)
        logits = whole.index_copy_(1, head.draft_vocabulary, logits)
    places = np.arange(len(logits))
    settings = row_settings([sampling], np.array([len(places)]), len(text) + places, logits)
    return sample_tokens(logits, *settings).numpy().astype(np.uint32)


class Switching:
    """Allows drafts in random runs of steps, or in those of a list."""

    def __init__(self, allowed=None):
        self._allowed = None if allowed is None else iter(allowed)
        self._rng = np.random.default_rng(6)
        self._is_allowed = True
        self.drafted = []

    @property
    def is_backing_off(self):
        if self._allowed is not None:
            self._is_allowed = next(self._allowed, True)
        elif self._rng.random() < 0.2:
            self._is_allowed = not self._is_allowed
        self.drafted.append(self._is_allowed)
        return not self._is_allowed

    def record(self, committed, launched, tokens, seconds):
        assert seconds > 0
        assert tokens <= committed.producers + committed.verified


def engine_of(model, kind, in_flight, *, config=CONFIG, depth=DEPTH, pages=None, drafting=None):
    """An engine with a graph executor whose drafts are made on the device, and the drafter's head."""
    drafter = new_drafter(kind, model, config, depth=depth)
    engine = build_engine(model, config, drafter)
    engine._may_run_ahead = AtRandom() if in_flight == "any" else in_flight == 1
    engine._device_drafting = engine._speculation._device_drafting = drafting
    if pages is not None:
        engine.scheduler = Scheduler(config, PagePool(pages, config.page_size), draft_ahead=depth)
    return engine, drafter.head


def requests(temperature, count=8, penalized=0.0):
    """Outputs have different lengths. penalized: fraction of requests that need the host."""
    rng, submitted = np.random.default_rng(2), networks.requests(temperature, count, is_plain=True)
    settings = [
        {
            "max_tokens": int(rng.integers(8, 30)),
            "top_k": 0 if temperature == COUPLED else int(rng.choice([0, 8])),
            "frequency_penalty": 0.5 if rng.random() < penalized else 0.0,
        }
        for _ in submitted
    ]
    return [
        replace(each, sampling=replace(each.sampling, **own)) for each, own in zip(submitted, settings, strict=True)
    ]


@pytest.fixture(scope="module")
def plain(model):
    return networks.plain_outputs(model, requests)


def total(completions, name):
    return sum(getattr(each, name) for each in completions)


@pytest.mark.parametrize(
    ("kind", "depth", "temperature", "in_flight"),
    [
        ("mtp", DEPTH, 0.0, 0),
        ("draft-model", DEPTH, 0.0, 1),
        ("eagle3", DEPTH, 0.8, 1),
        *((kind, DEPTH, COUPLED, 0) for kind in KINDS),
        ("mtp", 1, COUPLED, 1),  # The step has one further layer and no further pass.
    ],
)
def test_exact_outputs_equal_plain_decoding(model, plain, monkeypatch, kind, depth, temperature, in_flight):
    recorder = Recorder(monkeypatch)
    engine, head = engine_of(model, kind, in_flight, depth=depth)
    completions = engine.generate(requests(temperature))
    check_integrity(engine.scheduler)
    assert tokens_of(completions) == plain(temperature)
    assert any(each.cached_tokens for each in completions)
    assert total(completions, "accepted") > (40 if temperature == COUPLED else -1)
    drafted = sum(each.by_source["draft-model"].drafted for each in completions)
    assert drafted == total(completions, "drafted") > 22 * depth
    assert max(len(draft) for _, draft, _ in recorder.drafts) == depth
    assert recorder.are_right(head, model)


def test_the_time_of_drafting_is_that_of_the_same_step_without_it(model, monkeypatch):
    engine, head = engine_of(model, "mtp", 1)
    passes, forward = [], type(head).forward
    monkeypatch.setattr(type(head), "forward", lambda *arguments: (passes.append(0), forward(*arguments))[1])
    # A clock that advances with each pass of the head.
    monkeypatch.setattr("ssd.budget.curve.perf_counter", lambda: len(passes) / 4)
    assert engine.device_drafting_s(3) == DEPTH / 4
    engine._graph = None
    assert engine.device_drafting_s(3) is None


def test_a_drafter_in_the_targets_cache_drafts_on_the_host(model, plain):
    """The steps still run on the graph executor."""
    engine, _ = engine_of(model, "self", 0)
    assert engine._graph is not None
    assert engine._graph.chain is None
    completions = engine.generate(requests(0.8))
    assert tokens_of(completions) == plain(0.8)
    assert total(completions, "accepted") > 0.9 * total(completions, "drafted") > 50


@pytest.mark.parametrize(("kind", "temperature"), [("mtp", 0.8), ("eagle3", COUPLED), ("draft-model", 0.8)])
def test_workloads_with_cancellations_and_preemptions(model, plain, monkeypatch, kind, temperature):
    """Requests arrive at random, and some need the host, so that the executors alternate; so do the depth, and steps
    that draft and plain ones."""
    on_device, eager = Recorder(monkeypatch), networks.Recorder(monkeypatch)
    rng = np.random.default_rng(4)
    submitted = requests(temperature, 24, penalized=0.15)
    config = replace(CONFIG, watermark=0.0)
    engine, head = engine_of(model, kind, "any", config=config, pages=9, drafting=(drafting := Switching()))
    waiting, added, finished = iter(range(len(submitted))), {}, {}
    while engine.scheduler.has_work or len(added) < len(submitted):
        if len(added) < len(submitted) and rng.random() < 0.5:
            index = next(waiting)
            added[engine.add(submitted[index])] = index
        if added and rng.random() < 0.1:
            sequence_id = int(rng.choice(list(added)[-3:]))
            cancelled = engine.cancel(sequence_id)
            finished |= {} if cancelled is None else {sequence_id: cancelled}
        finished |= engine.step().finished
        check_integrity(engine.scheduler)
    assert engine.scheduler.preemptions > 0
    assert engine.scheduler.pages.free_count == engine.scheduler.pages.count
    assert finished.keys() == added.keys()
    aborted = [each for each in finished.values() if each.finish_reason is FinishReason.ABORT]
    assert 0 < len(aborted) < 10
    assert any(each.cached_tokens for each in finished.values())
    for sequence_id, expected in zip(added, plain(temperature, 24, 0.15), strict=True):
        produced = finished[sequence_id].tokens.tolist()
        is_whole = finished[sequence_id].finish_reason is not FinishReason.ABORT
        assert produced == (expected if is_whole else expected[: len(produced)])
    assert min(len(on_device.drafts), len(eager.calls)) > 20
    assert min(drafting.drafted.count(True), drafting.drafted.count(False)) > 4
    found = list(on_device.right(head, model))
    # Drafts that reach the next page are worse if no page is free.
    assert all(right for right, _ in found)
    assert sum(right == length for right, length in found) > 0.95 * len(found)
    assert eager.largest_difference(head, model) < TOLERANCE


@pytest.mark.parametrize(("kind", "in_flight"), [("mtp", 0), ("draft-model", 1)])
def test_slots_of_plain_steps_are_written_before_the_next_draft(model, plain, monkeypatch, kind, in_flight):
    """Runs of plain steps begin and end at any place in a page."""
    recorder = Recorder(monkeypatch)
    engine, head = engine_of(model, kind, in_flight, drafting=(drafting := Switching()))
    completions = engine.generate(requests(0.8, 16))
    assert tokens_of(completions) == plain(0.8, 16)
    assert min(drafting.drafted.count(True), drafting.drafted.count(False)) > 20
    assert any(each.cached_tokens for each in completions)
    assert len(recorder.drafts) > 50
    assert recorder.are_right(head, model)


@pytest.mark.parametrize(
    ("kind", "drafts", "fault"),
    [
        ("mtp", True, None),
        ("mtp", False, None),
        ("draft-model", False, None),
        ("mtp", False, SlotWriter.fill),
        ("draft-model", False, SlotWriter._mark_pages),
    ],
)
def test_pages_that_steps_filled_can_be_shared(model, monkeypatch, kind, drafts, fault):
    """A prompt that begins with an earlier output finds its pages; its first slot needs the state that was kept.

    Planted faults: slots that plain steps left are not written, or pages that lack them are not marked.
    """
    recorder = Recorder(monkeypatch)
    engine, head = engine_of(model, kind, 1, drafting=Switching([drafts] * 60))
    prompt = np.arange(1, 12, dtype=np.uint32)
    [first] = engine.generate([Request(prompt, SamplingParams(60, ignore_eos=True))])
    assert drafts or not recorder.drafts
    recorder.drafts.clear()
    if fault is not None:
        monkeypatch.setattr(SlotWriter, fault.__name__, lambda *_: None)
        for slots in engine.drafter._writer._slots.values():
            slots.complete_pages = 0
        engine.drafter._writer._is_complete[:] = True
    for cached in (16, 48, 64):
        text = np.concatenate((prompt, first.tokens))[: cached + 1]
        [completion] = engine.generate([Request(text, SamplingParams(20, ignore_eos=True))])
        assert completion.cached_tokens == cached
        assert completion.tokens[: 70 - cached].tolist() == first.tokens[cached - 10 :][:20].tolist()
    assert len(recorder.drafts) > 30
    assert recorder.are_right(head, model) == (fault is None)


def test_the_head_does_not_run_if_no_request_wants_drafts(model, plain, monkeypatch):
    engine, head = engine_of(model, "mtp", 1)
    monkeypatch.setattr(type(head), "forward", None)
    submitted = [replace(each, max_draft=0) for each in requests(0.8)]
    assert tokens_of(engine.generate(submitted)) == plain(0.8)


def test_requests_choose_the_length_of_their_drafts(model, plain):
    submitted = [replace(each, max_draft=index % 3) for index, each in enumerate(requests(COUPLED))]
    submitted[-1] = replace(submitted[-1], drafters=frozenset())
    engine, _ = engine_of(model, "mtp", 1)
    longest = [0] * 8

    def observe(report):
        for each in each_of(report.result):
            longest[each.sequence_id] = max(longest[each.sequence_id], each.drafted)

    assert tokens_of(engine.generate(submitted, observe)) == plain(COUPLED)
    assert longest == [0, 1, 2, 0, 1, 2, 0, 0]


def test_with_a_step_in_flight_the_next_is_launched_before_it_is_read(model):
    engine, _ = engine_of(model, "mtp", 1)
    events, launch, commit = [], engine._graph.launch, engine._commit
    engine._graph.launch = lambda plan: (events.append("launch"), launch(plan))[1]
    engine._commit = lambda step, watch: (events.append("read"), commit(step, watch))[1]
    engine.generate([Request(np.array([3, 1, 4], np.uint32), SamplingParams(20, ignore_eos=True))])
    assert events[:5] == ["launch", "launch", "read", "launch", "read"]


@pytest.mark.parametrize(("kind", "depth"), [("mtp", 1), ("eagle3", DEPTH), ("draft-model", DEPTH)])
def test_a_step_reads_no_values(model_folder, kind, depth):
    """A step with its drafting runs on tensors without values, so nothing of it waits for the device."""
    model = load_model(model_folder).to("meta")
    head = make_head(kind, model).to("meta")
    pool, longest = PagePool(40, 16), 200
    settings = 41, 16, torch.float32, "meta"
    shape = StepShape(4, 20, 1 + depth, 13)
    target = PlainAttention(model.config, *settings)
    own = PlainAttention(replace(head.config, num_layers=head.num_layers), *settings, first_slot=head.first_slot)
    forward = DraftForward((own,), target, pool, torch.device("meta"))
    state = DeviceState(8, longest, 13, pool.count, torch.device("meta"))
    drafter = new_drafter(kind, model, CONFIG, depth=depth, head=head)
    drafter.bind(forward)
    chain = drafter.device_chain(replace(CONFIG, max_sequences=8)).fixed(state, shape)
    runner = Runner(model, target, "meta")
    step = FixedStep(runner.fixed(shape), state, shape, 16, CopyStream(torch.device("cpu")), chain)
    with torch.inference_mode():
        for kind in (Kind(False, None, True), Kind(True, None, True), Kind(True, 32, True), Kind(True, None, False)):
            step._plan(np.full(4, longest - 1), np.zeros(4, int), kind)
            assert step._step(kind)[0].shape == (4, FIRST_TOKEN + 1 + 2 * depth)


def of_the_same_position(monkeypatch):
    """Planted fault: the head reads the state of each token instead of the one before it."""
    keep = FixedChain.keep_states
    monkeypatch.setattr(FixedChain, "keep_states", lambda *arguments: keep(*arguments).roll(-1, dims=0))


def without_pages_ahead(monkeypatch):
    """Planted fault: pages are allocated without regard to the drafting at the end of a step."""
    original = Scheduler.__init__
    monkeypatch.setattr(Scheduler, "__init__", lambda scheduler, *arguments: original(scheduler, *arguments[:3]))


def other_noise(monkeypatch):
    """Planted fault: the noise of the position before."""
    rows = FixedChain._single_rows

    def shifted(*arguments):
        found = rows(*arguments)
        return found._replace(positions=found.positions - 1)

    monkeypatch.setattr(FixedChain, "_single_rows", shifted)


@pytest.mark.parametrize("fault", [of_the_same_position, without_page_states, other_noise])
def test_planted_faults_are_caught(model, plain, monkeypatch, fault):
    recorder = Recorder(monkeypatch)
    fault(monkeypatch)
    engine, head = engine_of(model, "mtp", 0)
    submitted = requests(0.8)
    assert tokens_of(engine.generate(submitted)) == plain(0.8)
    assert not recorder.are_right(head, model)


@pytest.mark.parametrize("fault", [None, without_pages_ahead])
@pytest.mark.parametrize("in_flight", [0, 1])
def test_a_copy_of_the_target_is_always_accepted(model, monkeypatch, in_flight, fault):
    """With the target's noise every draft token equals the target's, if there is a page for every position."""
    if fault is not None:
        fault(monkeypatch)
    head = make_head("draft-model", model)
    head.model, head.config, head.num_layers = model, model.config, model.config.num_layers
    drafter = new_drafter("draft-model", model, CONFIG, depth=DEPTH, head=head)
    engine = build_engine(model, replace(CONFIG, max_draft=DEPTH), drafter)
    engine._may_run_ahead = in_flight == 1
    sampling = SamplingParams(120, 0.8, seed=1, ignore_eos=True)
    [completion] = engine.generate([Request(np.arange(1, 9, dtype=np.uint32), sampling)])
    assert completion.drafted > 80
    assert (completion.accepted == completion.drafted) == (fault is None)
