"""Drafters and verification of the `generate` command, and what it reports of drafts."""

import re
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from drafter_service.client import DrafterClient
from engine.commands import launch
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.registry import KINDS
from engine.drafters.sources import DraftSource
from ssd.baselines.none import NoDrafter
from ssd.budget.backoff import Backoff
from ssd.types import ROOT
from tests.engine.commands.generate.outputs import PROMPT, completions, records
from tests.engine.drafters.heads import make_head
from tests.servers import served

SAMPLING_DRAFTER = f"{__name__}:SamplingDrafter"


class SamplingDrafter(AutoregressiveDrafter):
    """A third-party drafter that samples its tokens; the option `depth` is the number of tokens."""

    def __init__(self, config, target):
        depth = int(config.options.get("depth", 3))
        super().__init__(make_head("mtp", target.model), depth=depth, has_trees=False, source=DraftSource.OTHER)


class TwoSources(SamplingDrafter):
    """Drafts as if the first token came from an MTP layer and the others from a network without a known source."""

    def propose(self, plan):
        drafts = super().propose(plan)
        source = np.where(drafts.batch.parents == ROOT, DraftSource.MTP, DraftSource.OTHER).astype(np.uint8)
        return replace(drafts, batch=replace(drafts.batch, source=source))


@pytest.fixture
def verify_all_drafts(monkeypatch):
    """Verify every draft token, so that results do not depend on the time that steps take."""
    build = launch.build_engine
    monkeypatch.setattr(launch, "build_engine", lambda *given, has_budget, **more: build(*given, **more))


def test_every_drafter_gives_the_same_output(
    run, model_folder, tmp_path, server, socket_address, draft_folders, corpus_file
):
    outputs = {}
    for drafter in KINDS:
        options = ("--drafter", drafter, "--address", socket_address, "--temperature", 1)
        limits = ("--max-tokens", 30, "--out", tmp_path / drafter)
        if drafter in draft_folders:
            options += ("--draft-model", draft_folders[drafter])
        if drafter == "rest":
            options += ("--drafter-option", f"path={corpus_file}")
        code, _, err = run("generate", "--model", model_folder, *options, *limits, PROMPT, PROMPT, "class")
        assert code == 0, err
        outputs[drafter] = completions(tmp_path / drafter)
    assert all(output == outputs["none"] for output in outputs.values())


@pytest.mark.usefixtures("verify_all_drafts")
def test_verification_by_rejection(run, model_folder, tmp_path):
    def outputs(drafter, verification, temperature):
        settings = ("--drafter", drafter, "--verification", verification, "--temperature", temperature)
        limits = ("--max-tokens", 40, "--out", tmp_path / "out")
        code, _, err = run("generate", "--model", model_folder, *settings, *limits, PROMPT, "class")
        assert code == 0, err
        return [line["tokens"] for line in completions(tmp_path / "out")], err

    plain, _ = outputs("none", "exact", 0.8)
    assert outputs(SAMPLING_DRAFTER, "exact", 0.8)[0] == plain
    rejection, summary = outputs(SAMPLING_DRAFTER, "rejection", 0.8)
    assert rejection != plain  # Accepted drafts replace the tokens that the seed alone gives.
    assert " 0 accepted" not in summary
    assert outputs(SAMPLING_DRAFTER, "rejection", 0)[0] == outputs("none", "exact", 0)[0]


@pytest.mark.usefixtures("verify_all_drafts")
def test_drafts_are_reported_by_source(run, model_folder, tmp_path):
    kind = f"{__name__}:TwoSources"
    arguments = ("--out", tmp_path / "out", "--max-tokens", 30, "--ignore-eos", PROMPT, PROMPT)
    code, _, err = run("generate", "--model", model_folder, "--drafter", kind, *arguments)
    assert code == 0, err
    drafts = [record["draft"] for record in records(tmp_path / "out")]
    assert [list(draft["by_source"]) for draft in drafts] == [["mtp", "other"]] * 2
    for draft in drafts:
        assert draft["tokens_per_step"] == pytest.approx(30 / draft["steps"], abs=1e-3)
        for figure in ("drafted_tokens", "accepted_tokens"):
            assert sum(counts[figure] for counts in draft["by_source"].values()) == draft[figure]
    by_source = err[err.index("by source: ") :]
    for name in ("mtp", "other"):
        drafted = sum(draft["by_source"][name]["drafted_tokens"] for draft in drafts)
        assert f"{name}: {drafted} drafted, " in " ".join(by_source.split())


def test_a_single_source_is_not_reported_twice(run, model_folder):
    _, _, err = run("generate", "--model", model_folder, "--drafter", "ngram", "--max-tokens", 5, PROMPT)
    assert "by source" not in err


@pytest.mark.parametrize(("drafter", "is_noted"), [("classic", True), ("none", False)])
def test_outputs_without_draft_tokens_are_explained(run, model_folder, drafter, is_noted):
    _, _, err = run("generate", "--model", model_folder, "--drafter", drafter, "--max-tokens", 5, PROMPT)
    assert ("no draft token was verified: the drafter proposed none" in " ".join(err.split())) is is_noted


@pytest.mark.usefixtures("verify_all_drafts")
def test_drafter_options_reach_the_drafter(run, model_folder, monkeypatch):
    base = ("generate", "--model", model_folder, "--max-tokens", 20, PROMPT)
    drafted = {}
    for depth in (1, 3):
        code, _, err = run(*base, "--drafter", SAMPLING_DRAFTER, "--drafter-option", f"depth={depth}")
        assert code == 0, err
        drafted[depth] = int(re.search(r"(\d+) drafted", " ".join(err.split()))[1])
    assert 0 < drafted[1] < drafted[3]
    made = []
    monkeypatch.setattr(launch, "build_drafter", lambda kind, config, *_, **__: made.append(config) or NoDrafter())
    options = ("--drafter-option", "match_depth=8", "--drafter-option", "capacity=5000", "--draft-shape", "tree")
    assert run(*base, *options)[0] == 0
    assert (made[0].match_depth, made[0].capacity, made[0].draft_shape) == (8, 5000, "tree")


@pytest.mark.parametrize("moment", ["between steps", "while an answer is awaited"])
def test_a_killed_sidecar_does_not_change_outputs(run, model_folder, tmp_path, socket_address, monkeypatch, moment):
    """If the sidecar is killed during the run, all requests finish as without drafts, with one warning."""
    prompts = [f"def f{number}():" for number in range(4)]
    options = ("--max-tokens", 30, "--max-sequences", 2, *prompts)
    plain = ("--drafter", "none", "--out", tmp_path / "plain")
    assert run("generate", "--model", model_folder, *plain, *options)[0] == 0
    draft, steps = DrafterClient.draft, iter(range(10_000))

    def draft_and_kill(client, progress):
        if next(steps) == 10:
            if moment == "between steps":
                process.kill()
                until = time.monotonic() + 30
                while client.lost is None:
                    assert time.monotonic() < until
                    time.sleep(0.01)
            else:
                # A stopped process does not answer; killing it ends the wait.
                client._deadline_s = 30
                process.send_signal(signal.SIGSTOP)
                threading.Timer(0.2, process.kill).start()
        return draft(client, progress)

    monkeypatch.setattr(DrafterClient, "draft", draft_and_kill)
    # Otherwise the number of steps that call the drafter would depend on measured durations.
    monkeypatch.setattr(Backoff, "record_drafts", lambda *_, **__: None)
    with served("--listen", socket_address, "--capacity", "100k") as process:
        remote = ("--drafter", "ssd-remote", "--address", socket_address, "--out", tmp_path / "remote")
        code, _, err = run("generate", "--model", model_folder, *remote, *options)
    assert next(steps) > 20
    assert code == 0
    assert " ".join(err.split()).count("continuing without drafts") == 1
    assert completions(tmp_path / "remote") == completions(tmp_path / "plain")
