"""The plug-in in a real vLLM, with the shipped model, on a CPU: `make hosts`.

A scenario runs in a process of its own, because a process has one engine:

    python -m tests.hosts.test_vllm NAME FILE

writes its results to a file, as JSON. The test after it checks them. `test_vllm_server.py` has what a server shows:
cancelled requests, preemption, and sidecars that are killed.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

import pytest

from tests.hosts import vllm_server
from tests.hosts.mimo import target_of
from tests.hosts.vllm_server import DEADLINE_S, MODEL, ROOT
from tests.servers import served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make hosts` runs these tests", allow_module_level=True)

HEADS = MODEL.parent / "stdlib-7m-heads"
PROMPTS = 20
MAX_TOKENS = 128
STOP = ["\n\n", "self."]
TIMEOUT_S = 600
ENVIRONMENT = {**vllm_server.ENVIRONMENT, "VLLM_ENABLE_V1_MULTIPROCESSING": "0"}


def prompts():
    lines = (MODEL / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    return [json.loads(line)["prompt"] for line in lines]


def sidecar(address):
    return served("--listen", address, "--capacity", "200k", "--max-draft", "32")


@contextmanager
def socket(**settings):
    """Set the address of a sidecar, and other settings of the plug-in; yield the address."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        os.environ["SSD_PLUGIN"] = json.dumps(
            {"sidecar": address, "drafting": "sidecar", "deadline_s": DEADLINE_S, **settings}
        )
        yield address


@contextmanager
def engine(drafts=None, network="", **options):
    """Run an engine, with the plug-in if `drafts` is a number of draft tokens; yield it.

    network: vLLM's name of a kind of network, which drafts four tokens in each step. Without drafts: its target.
    """
    from vllm import LLM

    if drafts is not None:
        options["scheduler_cls"] = "drafter_service.plugins.vllm.Scheduler"
        options["speculative_config"] = {
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": drafts,
        }
    if network and drafts is not None:
        options["async_scheduling"] = False
        options["speculative_config"] |= {
            "method": network,
            "model": str(HEADS / network.replace("_", "-")),
            "num_speculative_tokens_per_batch_size": [(1, 256, 4)],
        }
        if network == "mtp":  # It is a part of the target's checkpoint.
            del options["speculative_config"]["model"]
    options = {"max_model_len": 1024, **options}
    with target_of(network) as folder:
        llm = LLM(str(folder), dtype="float32", enforce_eager=True, disable_log_stats=False, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm, texts, *, at_once=False, **params):
    """Return the completions of prompts, one request at a time or in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params})
    batches = [texts] if at_once else [[text] for text in texts]
    return [completion.outputs[0] for batch in batches for completion in llm.generate(batch, sampling, use_tqdm=False)]


def tokens(completions):
    return [list(completion.token_ids) for completion in completions]


def counters(llm):
    """Return vLLM's own counters by name, without prefix."""
    return {
        metric.name.removeprefix("vllm:"): metric.values
        if hasattr(metric, "values")
        else getattr(metric, "value", None)
        for metric in llm.get_metrics()
    }


def session_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.ssd_session


def report(address):
    """Return the report of a sidecar."""
    command = [sys.executable, "-m", "drafter_service.commands.main", "report", "--address", address, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def run(name, folder):
    """Run a scenario; return its results, and its log as "log"."""
    file = folder / f"{name}.json"
    process = subprocess.run(
        [sys.executable, "-m", "tests.hosts.test_vllm", name, file],
        cwd=ROOT,
        env={**os.environ, **ENVIRONMENT},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=TIMEOUT_S,
    )
    assert file.exists(), process.stdout[-5000:]
    lines = [line for line in process.stdout.splitlines() if "ssd-drafter:" in line and "WARNING" in line]
    return {**json.loads(file.read_text()), "log": lines}


def has_only_losses(log):
    """Return whether each loss of the sidecar was logged once, and its end once. A slow machine may have some."""
    expected = itertools.cycle(["no connection", "drafting resumes"])
    return all(part in line for part, line in zip(expected, log, strict=False))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


# Scenarios, each before its test.


def plain_outputs():
    with engine() as llm:
        return {
            "outputs": tokens(generate(llm, prompts())),
            "stopped": [completion.text for completion in generate(llm, prompts(), stop=STOP)],
        }


@pytest.fixture(scope="module")
def plain(folder):
    return run("plain_outputs", folder)


def drafts():
    return drafts_of_length(8)


def drafts_of_a_replica():
    return drafts_of_length(32, drafting="replica")


def drafts_of_length(longest, **settings):
    """Run all prompts twice, then until a stop string, then with drafts of other tokens of the vocabulary alone."""
    with socket(**settings) as address, sidecar(address), engine(longest) as llm:
        from drafter_service.plugins.session import HostSession  # vLLM for CPUs must be imported before numba.

        outputs = [tokens(generate(llm, prompts())) for _ in range(2)]
        counted, host_counted = dict(vars(session_of(llm).counters)), counters(llm)
        stopped = [completion.text for completion in generate(llm, prompts(), stop=STOP)]
        draft, before = HostSession.draft, [session_of(llm).counters.verified, drafted(llm)]

        def draft_wrongly(session, *batch):
            return [[(token + 1) % 4096 for token in tokens] for tokens in draft(session, *batch)]

        with mock.patch.object(HostSession, "draft", draft_wrongly):
            wrong = tokens(generate(llm, prompts()))
        return {
            "outputs": outputs,
            "counters": counted,
            "host_counters": {name: value for name, value in host_counted.items() if name.startswith("spec_decode")},
            "stopped": stopped,
            "wrong": wrong,
            "verified": session_of(llm).counters.verified - before[0],
            "host_drafted": drafted(llm) - before[1],
            "report": report(address),
        }


def drafted(llm):
    return counters(llm)["spec_decode_num_draft_tokens"]


@pytest.mark.parametrize("scenario", ["drafts", "drafts_of_a_replica"])
def test_outputs_are_identical_and_both_sides_count_alike(plain, folder, scenario):
    result = run(scenario, folder)
    assert [*result["outputs"], result["wrong"]] == [plain["outputs"]] * 3
    assert result["stopped"] == plain["stopped"]
    assert 0 <= result["verified"] <= 0.05 * result["host_drafted"]
    counters, host = result["counters"], result["host_counters"]
    assert host["spec_decode_num_accepted_tokens_per_pos"][-1] > 0
    assert counters["failures"] == 0
    assert has_only_losses(result["log"])
    # vLLM also counts accepted tokens beyond max_tokens, which are not part of the output.
    assert counters["accepted"] <= host["spec_decode_num_accepted_tokens"]
    # On a busy machine some answers of a sidecar are late.
    assert counters["accepted"] > (0.4 if scenario == "drafts" else 0.7) * 2 * 20 * 128
    assert counters["verified"] <= host["spec_decode_num_draft_tokens"]
    (namespace,) = result["report"]["namespaces"]
    if scenario == "drafts":  # A replica sends its counts every ten seconds.
        assert namespace["drafting"]["accepted"] >= counters["accepted"]


def network_and_sidecar():
    return with_network("draft_model")


def network_and_replica():
    return with_network("eagle", drafting="replica")


def target_of_mtp():
    """Run without drafts: its weights are those of the shipped model, but sums are rounded in another order."""
    with engine(network="mtp") as llm:
        return {"outputs": tokens(generate(llm, prompts()))}


def mtp_and_replica():
    return with_network("mtp", drafting="replica")


def with_network(network, **settings):
    with socket(**settings) as address, sidecar(address), engine(16, network) as llm:
        return drafts_of_both(llm)


def drafts_of_both(llm):
    outputs = [tokens(generate(llm, prompts(), at_once=at_once)) for at_once in (False, True)]
    counted = counters(llm)
    return {
        "outputs": outputs,
        "counters": dict(vars(session_of(llm).counters)),
        "running": session_of(llm).running,
        "accepted": counted["spec_decode_num_accepted_tokens"],
        "by_position": counted["spec_decode_num_accepted_tokens_per_pos"],
    }


def network_that_fails():
    """Run with drafts of a network that are too long, too short, outside of the vocabulary or missing, in turn."""
    from vllm.v1.worker.gpu_model_runner import GPUModelRunner

    take, steps = GPUModelRunner.take_draft_token_ids, itertools.count()

    def take_wrongly(runner):
        taken = take(runner)
        if taken is not None:
            kind = next(steps) % 5
            taken.draft_token_ids = [wrong_draft(draft, kind) for draft in taken.draft_token_ids]
        return taken

    os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": "embedded"})
    with mock.patch.object(GPUModelRunner, "take_draft_token_ids", take_wrongly), engine(16, "eagle") as llm:
        return drafts_of_both(llm)


def wrong_draft(draft, kind):
    return [draft, draft * 9, [], [*draft[:1], 4096, 1 << 40], [-1, *draft]][kind]


@pytest.mark.parametrize(
    "scenario", ["network_and_sidecar", "network_and_replica", "mtp_and_replica", "network_that_fails"]
)
def test_drafts_of_a_network_and_of_the_corpus_change_no_output(plain, folder, scenario):
    result = run(scenario, folder)
    expected = run("target_of_mtp", folder) if scenario == "mtp_and_replica" else plain
    assert result["outputs"] == [expected["outputs"]] * 2
    assert has_only_losses(result["log"])
    counters = result["counters"]
    assert (counters["failures"], result["running"]) == (0, 0)
    assert counters["accepted"] <= result["accepted"]
    # More than the network alone, whose drafts have four tokens, could have in the second pass.
    assert sum(result["by_position"][4:]) > 0.3 * 20 * 128
    assert counters["accepted"] > 0.7 * 2 * 20 * 128


def changed_weights():
    """Do without drafts what `training` does with them."""
    with engine(enable_prefix_caching=True) as llm, other_weights() as folder:
        return trained(llm, folder)


def training():
    """Do what a trainer does to an engine between and within rollouts."""
    options = {"enable_prefix_caching": True, "async_scheduling": False}
    with socket(rollouts=True) as address, sidecar(address), engine(8, **options) as llm, other_weights() as folder:
        outputs = trained(llm, folder)
        session = session_of(llm)
        running = session.running
        session.close()
        (namespace,) = report(address)["namespaces"]
        versions = {each["version"]: each["requests"] for each in namespace["by_version"]}
        return {**outputs, "running": running, "counters": vars(session.counters), "versions": versions}


def trained(llm, folder):
    """Outputs while a prefix cache is reset, an engine sleeps, and its weights are replaced by those of a folder."""
    core, outputs = llm.llm_engine, {}
    outputs["first"] = tokens(generate(llm, prompts(), at_once=True))
    outputs["reset within"] = reset_within(core)
    llm.sleep(level=1)
    outputs["asleep"] = core.engine_core.engine_core.is_sleeping()
    llm.wake_up()
    outputs["after sleep"] = tokens(generate(llm, prompts(), at_once=True))
    for version, (name, path) in enumerate((("other weights", folder), ("first weights", MODEL)), 1):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        outputs["reset"] = llm.reset_prefix_cache()
        options = {"at_once": True, "extra_args": {"ssd_version": version}}
        outputs[name] = [tokens(generate(llm, prompts(), **options)) for _ in range(2)]
    return outputs


def reset_within(core):
    """Outputs of a batch, in the middle of which the prefix cache is reset and all requests are preempted."""
    from vllm import SamplingParams

    for at, prompt in enumerate(prompts()):
        core.add_request(str(at), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    finished, steps = {}, 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        steps += 1
        if steps in (4, 8):
            assert core.reset_prefix_cache(reset_running_requests=True)
    return [finished[at] for at in range(PROMPTS)]


@contextmanager
def other_weights():
    """Yield a copy of the model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="ssd-") as parent:
        folder = Path(parent) / "model"
        shutil.copytree(MODEL, folder)
        weights = load_file(folder / "model.safetensors")
        noise = torch.Generator().manual_seed(0)
        changed = {name: each + 0.02 * torch.randn(each.shape, generator=noise) for name, each in weights.items()}
        save_file({name: each.to(weights[name].dtype) for name, each in changed.items()}, folder / "model.safetensors")
        yield folder


def test_a_trainer_changes_weights_between_and_within_rollouts(folder):
    """The prefix cache is reset while requests run, the engine sleeps, and gets other weights, and the first again."""
    expected, result = run("changed_weights", folder), run("training", folder)
    running, counters, versions = (result.pop(name) for name in ("running", "counters", "versions"))
    log = [expected.pop("log"), result.pop("log")]
    assert result == expected
    assert log[0] == []
    assert has_only_losses(log[1])
    assert running == 0
    assert counters["failures"] == 0
    assert counters["accepted"] > 0.5 * 20 * 128
    assert versions == {"0": 60, "1": 40, "2": 40}
    first = expected["first"]
    assert expected["reset within"] == expected["after sleep"] == first
    assert expected["first weights"] == [first] * 2
    assert all(one != other for one, other in zip(expected["other weights"][0], first, strict=True))
    assert expected["asleep"]


def no_sidecar():
    """Start without a sidecar, which is started later."""
    with socket() as address, engine(8) as llm:
        from tests.drafter_service.raw import eventually  # It imports numba, which must not be loaded before vLLM.

        outputs = [tokens(generate(llm, prompts()[:5]))]
        with sidecar(address):
            drafter = session_of(llm).namespaces.find("", "").drafter
            eventually(lambda: drafter.lost is None)
            outputs += [tokens(generate(llm, prompts()[:5])) for _ in range(2)]
            session_of(llm).close()
        return {"outputs": outputs, "counters": vars(session_of(llm).counters)}


def test_a_sidecar_may_be_started_later(plain, folder):
    result = run("no_sidecar", folder)
    assert result["outputs"] == [plain["outputs"][:5]] * 3
    assert result["counters"]["accepted"] > 0
    absent, *lines = result["log"]
    assert "no drafter answers at" in absent
    assert has_only_losses(lines)
    assert "drafting resumes" in lines[-1]


def test_the_example_accepts_drafts(socket_address):
    command = [sys.executable, ROOT / "examples" / "vllm_offline.py", socket_address]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with served("--listen", socket_address, "--capacity", "200k"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    accepted = [int(number) for number in re.findall(r"pass \d: (\d+) of", done.stdout)]
    assert len(accepted) == 3
    assert sum(accepted) > 50


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(globals()[sys.argv[1]]()))
