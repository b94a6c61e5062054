"""The plug-in in a real vLLM, with the shipped model, on a CPU: `make hosts`."""

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.drafter_service.plugins.vllm import fake_vllm
from tests.servers import served

if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not installed; `make hosts` runs these tests", allow_module_level=True)

ROOT = Path(__file__).parents[2]
TIMEOUT_S = 600
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def run(name, folder):
    """Run a scenario; return its results, and its log as "log"."""
    file = folder / f"{name}.json"
    process = subprocess.run(
        [sys.executable, "-m", "tests.hosts.vllm_scenarios", name, file],
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


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="module")
def plain(folder):
    return run("plain", folder)


@pytest.mark.parametrize("scenario", ["drafts", "drafts_of_a_replica"])
def test_outputs_are_identical_and_both_sides_count_alike(plain, folder, scenario):
    result = run(scenario, folder)
    assert result["outputs"] == [plain["outputs"]] * 2
    assert result["stopped"] == plain["stopped"]
    counters, host = result["counters"], result["host_counters"]
    assert counters["failures"] == 0
    assert result["log"] == []
    # vLLM also counts accepted tokens beyond max_tokens, which are not part of the output.
    assert counters["accepted"] <= host["spec_decode_num_accepted_tokens"]
    assert counters["accepted"] > 0.7 * 2 * 20 * 128
    assert counters["verified"] <= host["spec_decode_num_draft_tokens"]
    (namespace,) = result["report"]["namespaces"]
    assert namespace["drafting"]["accepted"] >= counters["accepted"]


def test_what_a_trainer_does_between_and_within_rollouts(folder):
    """The prefix cache is reset while requests run, the engine sleeps, and gets other weights, and the first again."""
    expected, result = run("changed_weights", folder), run("training", folder)
    running, counters, versions = (result.pop(name) for name in ("running", "counters", "versions"))
    log = [expected.pop("log"), result.pop("log")]
    assert result == expected
    assert log == [[], []]
    assert running == 0
    assert counters["failures"] == 0
    assert counters["accepted"] > 0.5 * 20 * 128
    assert versions == {"0": 60, "1": 40, "2": 40}
    first = expected["first"]
    assert expected["reset within"] == expected["after sleep"] == first
    assert expected["first weights"] == [first] * 2
    assert all(one != other for one, other in zip(expected["other weights"][0], first, strict=True))
    assert expected["asleep"]


def test_drafts_of_32_tokens(plain, folder):
    result = run("long_drafts", folder)
    assert result["outputs"] == [plain["outputs"]] * 2
    assert result["accepted_at_last_position"] > 0


def test_a_drafter_that_is_always_wrong_changes_nothing(plain, folder):
    result = run("wrong_drafts", folder)
    assert result["outputs"] == [plain["outputs"]]
    assert result["host_drafted"] > 0
    assert result["verified"] <= 0.05 * result["host_drafted"]


def says_lost_and_resumed(log):
    """Return whether each loss was logged once, and its end once. On a slow machine there may be several."""
    pairs = list(zip(log[::2], log[1::2], strict=True))
    return bool(pairs) and all("no connection" in lost and "drafting resumes" in resumed for lost, resumed in pairs)


def test_a_sidecar_may_be_started_later(plain, folder):
    result = run("no_sidecar", folder)
    assert result["outputs"] == [plain["outputs"][:5]] * 3
    assert result["counters"]["accepted"] > 0
    assert says_lost_and_resumed(result["log"])


def test_a_missing_speculative_configuration_costs_drafts_only(plain, folder):
    result = run("no_speculation", folder)
    assert result["outputs"] == [plain["outputs"][:5]]
    (line,) = result["log"]
    assert "there is no speculative decoding; start vLLM with --scheduler-cls" in line


def test_another_tokenizer_costs_drafts_only(plain, folder):
    result = run("other_tokenizer", folder)
    assert result["outputs"] == [plain["outputs"][:5]] * 2
    (line,) = result["log"]
    assert "another tokenizer" in line


def test_the_example_accepts_drafts(socket_address):
    command = [sys.executable, ROOT / "examples" / "vllm_offline.py", socket_address]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(ROOT)}
    with served("--listen", socket_address, "--capacity", "200k"):
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, env=environment)
    assert done.returncode == 0, done.stderr
    accepted = [int(number) for number in re.findall(r"pass \d: (\d+) of", done.stdout)]
    assert len(accepted) == 3
    assert sum(accepted) > 50


def test_the_fake_has_the_signatures_and_names_of_vllm():
    fake_vllm.compare_with_host()
