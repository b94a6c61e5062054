"""The plug-in for vLLM 0.33 with the host's own Python classes, see `host.py`. Skipped where vLLM is not installed."""

import itertools
import json
import shlex
from unittest import mock

import pytest

from drafter_service.plugins.options import End
from drafter_service.plugins.vllm.__main__ import main
from drafter_service.plugins.vllm.variants import SETUPS, Variant, choose
from tests.drafter_service.plugins.helpers import corpus_of, plain
from tests.drafter_service.plugins.vllm.host import ASYNC, BLOCK, MAX_MODEL_LEN, MODEL, V1, Engine, vllm_config
from tests.drafter_service.raw import eventually

PROMPTS = {"a": [1, 2, 3, 4, 5, 1, 2, 3], "b": [3, 4, 5, 1, 2, 3], "c": [7, 1, 2, 3, 4, 5] * 15}
pytestmark = pytest.mark.usefixtures("vllm")
CONFIGS = {
    "v1": {"speculation": V1},
    "v2": {},
    "v2-asynchronous": ASYNC,
    "v2-adaptive": {**ASYNC, "is_adaptive": True, "ranks": 2},
    "v2-pipeline": {"stages": 2},
    "v2-asynchronous-pipeline": {**ASYNC, "stages": 2},
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
        steps.append(run_turn(engine, turn))
        corpus_of(session_of(engine))
    assert list(engine.outputs.values()) == [plain(prompt) for prompt in PROMPTS.values()] * 2
    stages = 1 if engine.runner is None or not engine.runner.use_pp else 2  # Each stage runs other requests.
    assert steps[1] < steps[0] < 34 * stages
    assert session_of(engine).counters.tokens_per_step > 1.8
    counters = session_of(engine).counters
    if not engine.is_asynchronous:  # There the host also counts what short drafts are continued with.
        assert (counters.verified, counters.accepted) == (engine.drafted, engine.accepted)
    elif engine.runner.adaptive_verification is not None:
        assert counters.accepted <= counters.verified == engine.verified < 0.7 * engine.drafted


NETWORK = {
    **ASYNC,
    "speculation": {
        "method": "draft_model",
        "model": MODEL,
        "num_speculative_tokens": 8,
        "num_speculative_tokens_per_batch_size": [[1, 8, 3]],
    },
    "budget": 160,
}


@pytest.mark.parametrize("is_adaptive", [False, True])
def test_the_hosts_network_and_the_corpus_draft_together(monkeypatch, is_adaptive):
    engine = Engine(vllm_config(**NETWORK, is_adaptive=is_adaptive), monkeypatch)
    speculator, observed = engine.runner.speculator, []
    speculator.acceptance_estimator = mock.Mock(step=lambda _, *counts: observed.append(sum(counts).sum()))
    steps = []
    for turn in range(2):
        steps.append(run_turn(engine, turn))
        corpus_of(session_of(engine))
    assert list(engine.outputs.values()) == [plain(prompt) for prompt in PROMPTS.values()] * 2
    counters = session_of(engine).counters
    assert counters.failures == 0
    assert {3} <= speculator.lengths <= {0, 3}  # None where no request could use them.
    # The network alone: three tokens in a step, of which there are twelve. The corpus knows the second turn.
    assert steps[1] < steps[0] <= 12
    assert counters.tokens_per_step > 3
    # The host learns from its own drafts only.
    assert 0 < sum(observed) < counters.verified
    if is_adaptive:
        assert engine.verified < 0.8 * engine.drafted
    engine.scheduler.shutdown()


def test_the_check_says_what_vllm_does_where_it_refuses_a_length_for_each_request(monkeypatch, capsys):
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    speculation = {"method": "ngram", "num_speculative_tokens": 8, "enable_adaptive_verification": True}
    assert main(["check", MODEL, "--max-model-len", "256", "--speculative-config", json.dumps(speculation)]) == 1
    printed = capsys.readouterr().out
    assert "Adaptive verification requires full CUDA graphs" in printed  # There are none on a CPU.
    assert "without enable_adaptive_verification all requests" in printed


def run_turn(engine, name):
    """Run the prompts once; return the number of steps."""
    before = engine.steps
    for prompt_name, prompt in PROMPTS.items():
        engine.add(f"{name}{prompt_name}", prompt)
    engine.run()
    return engine.steps - before


def test_a_worker_drafts_from_a_copy_of_the_sidecars_corpus(monkeypatch, socket_address, server_process):
    monkeypatch.setenv("SSD_PLUGIN", json.dumps({"sidecar": socket_address}))
    engine = Engine(vllm_config(**ASYNC), monkeypatch)
    assert type(session_of(engine).namespaces.find("", "").drafter).__name__ == "ReplicaClient"
    first, turns = run_turn(engine, 0), itertools.count(1)
    eventually(lambda: run_turn(engine, next(turns)) < 0.8 * first)
    assert {*map(tuple, engine.outputs.values())} == {tuple(plain(prompt)) for prompt in PROMPTS.values()}
    assert session_of(engine).counters.failures == 0
    session_of(engine).close()
    engine.scheduler.shutdown()


def test_the_length_of_a_steps_drafts_follows_from_what_the_corpus_finds(monkeypatch):
    speculation = {"num_speculative_tokens": 8, "num_speculative_tokens_per_batch_size": [[1, 2, 8], [3, 8, 2]]}
    engine = Engine(vllm_config(**ASYNC, speculation=speculation), monkeypatch)
    for number in range(3):
        engine.add(f"random{number}", [1000 + number * 50 + at for at in range(20)], 12)
    engine.run()
    unknown = engine.lengths
    engine.lengths = set()
    for turn in range(2):
        run_turn(engine, turn)
        corpus_of(session_of(engine))
    # The host would verify two tokens of each of the three requests.
    assert (unknown, engine.lengths) == ({2}, {2, 8})
    assert list(engine.outputs.values())[-3:] == [plain(prompt) for prompt in PROMPTS.values()]
    engine.scheduler.shutdown()


@pytest.mark.parametrize("options", [{}, ASYNC])
def test_the_table_of_all_tokens_is_in_the_hosts_memory(monkeypatch, options):
    from vllm.v1.worker.gpu import buffer_utils

    made, make = [], buffer_utils.StagedWriteTensor
    monkeypatch.setattr(
        buffer_utils, "StagedWriteTensor", lambda *args, **more: made.append(more) or make(*args, **more)
    )
    engine = Engine(vllm_config(**options), monkeypatch)
    assert [more["uva_instead_of_gpu"] for more in made] == [True]
    assert engine.runner.req_states.all_token_ids.gpu.shape == (8, MAX_MODEL_LEN)
    engine.scheduler.shutdown()


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


def test_the_reason_of_the_end_decides_whether_a_request_is_learned(make_engine):
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
        assert end is End.FINISHED
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


def test_a_request_whose_prompt_is_streamed_is_not_remembered(make_engine):
    """Each part has options of its own; the last one ends the request."""
    engine = make_engine()
    engine.add("a", PROMPTS["a"], 8, resumable=True)
    engine.step()
    engine.add("a", PROMPTS["b"], 8, resumable=True, extra_args={"ssd_private": True})
    engine.add("a", [], 8)
    engine.run()
    assert len(engine.outputs["a"]) >= 8
    assert (corpus_of(session_of(engine)).tokens, session_of(engine).counters.drafted) == (0, 0)


def test_options_and_salts(make_engine):
    engine = make_engine()
    engine.add("a", PROMPTS["a"], extra_args={"ssd_max_draft": 0})
    engine.run()
    assert session_of(engine).counters.drafted == 0
    engine.add("b", PROMPTS["a"], cache_salt="s")
    engine.run()
    assert set(session_of(engine).namespaces.opened) == {("", ""), ("", "s")}
