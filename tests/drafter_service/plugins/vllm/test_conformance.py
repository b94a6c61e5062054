"""The plug-in for vLLM 0.33 with the host's own Python classes, see `host.py`. Skipped where vLLM is not installed."""

import shlex

import pytest

from drafter_service.plugins.vllm.__main__ import main
from drafter_service.plugins.vllm.variants import PROPOSER, SETUPS, Variant, choose
from tests.drafter_service.plugins import signatures
from tests.drafter_service.plugins.helpers import corpus_of, plain
from tests.drafter_service.plugins.vllm import fake_vllm
from tests.drafter_service.plugins.vllm.host import BLOCK, MODEL, Engine, import_vllm, vllm_config

PROMPTS = {"a": [1, 2, 3, 4, 5, 1, 2, 3], "b": [3, 4, 5, 1, 2, 3], "c": [7, 1, 2, 3, 4, 5] * 15}
V1 = {"method": "custom_class", "model": PROPOSER}


@pytest.fixture(scope="module", autouse=True)
def _host():
    import_vllm()


@pytest.fixture(autouse=True)
def _settings(monkeypatch):
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "embedded", "capacity": 20000}')
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")


CONFIGS = {
    "v1": {"speculation": V1},
    "v2": {},
    "v2-asynchronous": {"scheduler": "drafter_service.plugins.vllm.AsyncScheduler", "is_asynchronous": True},
}


@pytest.fixture(params=CONFIGS)
def make_engine(request, monkeypatch):
    """Make engines of one variant; at the end, check what host and plug-in counted."""
    made = []

    def make(**options):
        if request.param == "v1":
            monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "0")
        config = vllm_config(**CONFIGS[request.param], **{name: options[name] for name in options if name == "budget"})
        assert config.use_v2_model_runner == (request.param != "v1")
        made.append(Engine(config, monkeypatch, options.get("blocks", 60)))
        return made[-1]

    yield make
    for engine in made:
        counters = session_of(engine).counters
        assert counters.failures == 0
        if not engine.is_asynchronous:  # Steps in flight run on after their request was aborted.
            assert counters.verified <= engine.drafted
            assert counters.accepted <= engine.accepted
        assert session_of(engine).running == 0
        engine.scheduler.shutdown()


def session_of(engine):
    return engine.runner.speculator.drafts.session if engine.is_asynchronous else engine.scheduler.ssd_session


def test_the_host_has_the_recorded_signatures_and_the_names_of_the_fake():
    import vllm

    assert vllm.__version__.startswith("0.33.")
    recorded = signatures.load("vllm")
    assert signatures.record(recorded) == recorded
    fake_vllm.compare_with_host()


@pytest.mark.parametrize(
    ("options", "environment", "variant", "reason"),
    [
        ({}, "1", Variant.V2_SCHEDULER, "the V2 model runner verifies"),
        ({"speculation": V1}, "0", Variant.V1_SCHEDULER, "the V1 model runner verifies"),
        ({"speculation": V1}, None, Variant.V1_SCHEDULER, "the V1 model runner verifies"),
        ({"worker": "vllm.v1.worker.gpu_worker.Worker"}, "1", Variant.NONE, "the worker is vllm.v1.worker.gpu_worker"),
        ({"is_asynchronous": True}, "1", Variant.NONE, "the engine is asynchronous, and its scheduler is not"),
        (CONFIGS["v2-asynchronous"], "1", Variant.V2_WORKER, "the V2 model runner verifies the drafts of this worker"),
        ({}, "0", Variant.NONE, "speculative decoding is ngram with ngram"),
    ],
)
def test_the_hosts_own_configurations(monkeypatch, options, environment, variant, reason):
    if environment is None:
        monkeypatch.delenv("VLLM_USE_V2_MODEL_RUNNER")
    else:
        monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", environment)
    choice = choose(vllm_config(**options))
    assert (choice.variant, reason in choice.reason) == (variant, True), choice


@pytest.mark.parametrize(
    ("variant", "environment"), [(Variant.V2_SCHEDULER, "1"), (Variant.V1_SCHEDULER, "0"), (Variant.V2_WORKER, "0")]
)
def test_the_check_reads_the_flags_of_a_server(monkeypatch, capsys, variant, environment):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", environment)
    flags = shlex.split(SETUPS[variant].flags)
    status = main(["check", MODEL, "--port", "8001", "--max-model-len", "256", *flags])
    printed = capsys.readouterr().out
    if variant is Variant.V2_WORKER:  # The V1 model runner, which machines without Triton have.
        assert (status, "vLLM refuses this configuration" in printed) == (1, True), printed
    else:
        assert (status, f"drafts: in the {variant.value}" in printed) == (0, True), printed


def test_outputs_are_identical(make_engine):
    engine = make_engine()
    steps = []
    for turn in range(2):
        before = engine.steps
        for name, prompt in PROMPTS.items():
            engine.add(f"{turn}{name}", prompt)
        engine.run()
        steps.append(engine.steps - before)
        corpus_of(session_of(engine))
    assert list(engine.outputs.values()) == [plain(prompt) for prompt in PROMPTS.values()] * 2
    assert steps[1] < steps[0] < 34
    assert session_of(engine).counters.tokens_per_step > 1.8
    if not engine.is_asynchronous:  # There the host also counts what short drafts are continued with.
        counters = session_of(engine).counters
        assert (counters.verified, counters.accepted) == (engine.drafted, engine.accepted)


def test_padding_after_prefix_hits_is_not_counted(make_engine):
    engine = make_engine()
    prompt = PROMPTS["c"][: 2 * BLOCK + 1]
    engine.add("a", prompt)
    engine.run()
    engine.add("b", PROMPTS["b"])
    engine.step()
    engine.add("c", prompt)
    engine.run()
    assert list(engine.outputs.values()) == [plain(prompt), plain(PROMPTS["b"]), plain(prompt)]
    assert engine.padded > 0
    if not engine.is_asynchronous:  # There the host also counts what short drafts are continued with.
        counters = session_of(engine).counters
        assert (counters.verified, counters.accepted) == (engine.drafted, engine.accepted)


def test_chunked_prompts_and_preemption(make_engine):
    engine = make_engine(budget=24, blocks=9)
    prompts = [PROMPTS["c"][at : at + 50] for at in range(4)]
    for at, prompt in enumerate(prompts):
        engine.add(str(at), prompt, 60)
    assert engine.run() == [plain(prompt, 60) for prompt in prompts]
    assert engine.preemptions > 0
    assert session_of(engine).counters.accepted > 0


def test_what_ended_a_request_decides_whether_it_is_learned(make_engine):
    from vllm.v1.request import RequestStatus

    engine = make_engine()
    engine.add("a", PROMPTS["a"], 200)
    engine.add("b", PROMPTS["b"], 200, stop=["x"])
    for _ in range(5):
        engine.step()
    engine.scheduler.finish_requests("a", RequestStatus.FINISHED_ABORTED)
    engine.step()
    assert corpus_of(session_of(engine)).tokens == 0
    engine.scheduler.finish_requests("b", RequestStatus.FINISHED_ABORTED)  # As the front end reports a stop string.
    engine.run()
    assert corpus_of(session_of(engine)).tokens > 0


@pytest.mark.parametrize("stop", [[], [6]])
def test_the_drafter_learns_what_the_client_got(make_engine, monkeypatch, stop):
    engine = make_engine()
    learned = {}
    session, finish = session_of(engine), session_of(engine).finish

    def record(request_id, text, end):
        # The drafter has learned nothing beyond the end.
        assert session._requests[request_id].reported <= len(text)
        learned[request_id] = list(text)
        finish(request_id, text, end)

    monkeypatch.setattr(session, "finish", record)
    for name, prompt in PROMPTS.items():
        # Drafts that go on after the end are accepted, and discarded by the host.
        hints = [*prompt, *plain(prompt, 60)]
        engine.add(name, prompt, 40, stop_token_ids=stop, extra_args={"hints": hints})
    engine.run()
    assert learned == {name: [*PROMPTS[name], *output] for name, output in engine.outputs.items()}
    assert {len(output) < 40 for output in engine.outputs.values()} == {bool(stop)}


def test_options_and_salts(make_engine):
    engine = make_engine()
    engine.add("a", PROMPTS["a"], extra_args={"ssd_max_draft": 0})
    engine.run()
    assert session_of(engine).counters.drafted == 0
    engine.add("b", PROMPTS["a"], cache_salt="s")
    engine.run()
    assert set(session_of(engine).namespaces.opened) == {("", ""), ("", "s")}
