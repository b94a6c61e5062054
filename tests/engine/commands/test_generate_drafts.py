"""Drafters and verification of the `generate` command, and what it reports of drafts."""

import signal
import threading
import time
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from drafter_service.client import DrafterClient
from engine.api.server import build_engine_from
from engine.commands import launch
from engine.commands.options import EngineOptions
from engine.drafters.autoregressive import AutoregressiveDrafter
from engine.drafters.registry import KINDS
from engine.drafters.sources import DraftSource
from engine.scheduling.request import Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.budget.backoff import Backoff
from ssd.config import DrafterConfig
from ssd.types import ROOT
from tests.engine.commands.test_generate import PROMPT
from tests.engine.drafters.heads import make_head
from tests.servers import served, serving


class TwoSources(AutoregressiveDrafter):
    """Drafts as if the first token came from an MTP layer and the others from a network without a known source."""

    def __init__(self, config, target):
        super().__init__(make_head("mtp", target.model), depth=3, has_trees=False, source=DraftSource.OTHER)

    def propose(self, plan):
        drafts = super().propose(plan)
        source = np.where(drafts.batch.parents == ROOT, DraftSource.MTP, DraftSource.OTHER).astype(np.uint8)
        return replace(drafts, batch=replace(drafts.batch, source=source))


def test_every_drafter_gives_the_same_output(generate, server, socket_address, draft_folders, corpus_file):
    outputs = {}
    for drafter in KINDS:
        options = ["--drafter", drafter, "--address", socket_address, "--temperature", 1, "--max-tokens", 30]
        if drafter in draft_folders:
            options += ["--draft-model", draft_folders[drafter]]
        if drafter == "rest":
            options += ["--drafter-option", f"path={corpus_file}"]
        outputs[drafter] = generate(*options, PROMPT, PROMPT, "class").records
    assert all(output == outputs["none"] for output in outputs.values())


def test_drafts_are_reported_by_source(generate, monkeypatch):
    build = launch.build_engine  # Without a budget every draft token is verified, however long steps take.
    monkeypatch.setattr(launch, "build_engine", lambda *given, has_budget, **more: build(*given, **more))
    written = generate("--drafter", f"{__name__}:TwoSources", "--max-tokens", 30, "--ignore-eos", PROMPT, PROMPT)
    assert [list(draft["by_source"]) for draft in written.drafts] == [["mtp", "other"]] * 2
    for draft in written.drafts:
        assert draft["tokens_per_step"] == pytest.approx(30 / draft["steps"], abs=1e-3)
        for figure in ("drafted_tokens", "accepted_tokens"):
            assert sum(counts[figure] for counts in draft["by_source"].values()) == draft[figure]
    by_source = written.err.partition("by source: ")[2]
    for name in ("mtp", "other"):
        drafted = sum(draft["by_source"][name]["drafted_tokens"] for draft in written.drafts)
        assert f"{name}: {drafted} drafted, " in by_source


@pytest.mark.parametrize(("drafter", "is_noted"), [("classic", True), ("none", False)])
def test_outputs_without_draft_tokens_are_explained(generate, drafter, is_noted):
    err = generate("--drafter", drafter, "--max-tokens", 5, PROMPT).err
    assert ("no draft token was verified: the drafter proposed none" in err) is is_noted
    assert "by source" not in err


def test_options_reach_the_drafter_and_the_engine(generate, monkeypatch):
    made, build = [], launch.build_engine
    monkeypatch.setattr(launch, "build_drafter", lambda kind, config, *_, **__: made.append(config) or NoDrafter())
    monkeypatch.setattr(launch, "build_engine", lambda *given, **more: made.append(given[1]) or build(*given, **more))
    options = ("--drafter-option", "match_depth=8", "--drafter-option", "capacity=5000", "--draft-shape", "tree")
    err = generate(*options, "--verification", "rejection", "--max-draft", 5, "--max-tokens", 1, PROMPT).err
    drafting, engine = made
    assert (drafting.match_depth, drafting.capacity, drafting.draft_shape) == (8, 5000, "tree")
    assert (engine.verification, engine.max_draft, engine.draft_shape) == ("rejection", 5, "tree")
    assert "by source" not in err


def test_a_killed_sidecar_does_not_change_outputs(generate, socket_address, monkeypatch):
    """If the sidecar is killed while a step waits for it, all requests finish as without drafts, with one warning."""
    options = ("--max-tokens", 30, "--max-sequences", 2, *(f"def f{number}():" for number in range(4)))
    plain = generate("--drafter", "none", *options).records
    draft, steps = DrafterClient.draft, iter(range(10_000))

    def draft_and_kill(client, progress):
        if next(steps) == 10:
            # A stopped process does not answer; killing it ends the wait.
            process.send_signal(signal.SIGSTOP)
            threading.Timer(0.2, process.kill).start()
        return draft(client, progress)

    monkeypatch.setattr(DrafterClient, "draft", draft_and_kill)
    # Otherwise the number of steps that call the drafter would depend on measured durations.
    monkeypatch.setattr(Backoff, "record_drafts", lambda *_, **__: None)
    sidecar = ("--drafter", "ssd-remote", "--address", socket_address, "--drafter-option", "deadline_s=30")
    with served("--listen", socket_address, "--capacity", "100k") as process:
        remote = generate(*sidecar, *options)
    assert next(steps) > 20
    assert remote.err.count("continuing without drafts") == 1
    assert remote.records == plain


def test_an_engine_that_starts_before_its_sidecar_connects_later(model_folder, socket_address, capfd):
    options = EngineOptions(
        folder=model_folder, drafter="ssd-remote", address=socket_address, require_sidecar=False, device="cpu"
    )
    request = Request(np.arange(1, 20, dtype=np.uint32), SamplingParams(40, ignore_eos=True))
    with closing(build_engine_from(options, ())) as engine:
        [plain] = engine.generate([request])
        assert capfd.readouterr().err.startswith(f"warning: no connection to the drafter at {socket_address} (")
        with serving(listen=socket_address, drafting=DrafterConfig(capacity=100_000)):
            printed, drafted, until = "", 0, time.monotonic() + 60
            while not (drafted and printed):
                assert time.monotonic() < until
                [completion] = engine.generate([request])
                assert completion.tokens.tolist() == plain.tokens.tolist()
                drafted, printed = drafted + completion.drafted, printed + capfd.readouterr().err
    assert printed == f"warning: reconnected to the drafter at {socket_address}; drafting resumes\n"
