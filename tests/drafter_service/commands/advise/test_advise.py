"""Tests of `ssd-drafter advise`: its verdict, groups, capacity and settings, and the logs that it refuses."""

import json
import os
import re
import tempfile

import numpy as np
import pytest
from click.testing import CliRunner

from drafter_service.commands.advise import trials
from drafter_service.commands.advise.advice import advise, plan_samples, plan_whole
from drafter_service.commands.advise.page import HEADS
from drafter_service.commands.advise.reading import LogFacts
from drafter_service.commands.advise.trials import run_trial
from drafter_service.commands.main import cli
from drafter_service.ingest.containers import VLLM_LOG
from drafter_service.settings.tree import load_settings
from ssd.budget.cost_profile import CostProfile
from tests.browser import page_faults
from tests.drafter_service.commands.advise.logs import random_requests, repeated_requests, write_log
from tests.drafter_service.ingest.loads import model_folder
from tests.replay import recording_of

CHEAP = CostProfile("test", "tiny", {n: {1: 100.0 + 0.1 * n, 4: 100.0 + 0.1 * n} for n in (1, 10_000)})


def advice_of(recording, concurrency=1, profile=CHEAP, sampled=None):
    """Return the advice; sampled: another log with which settings are compared."""

    sampled = sampled or recording
    samples = [
        run_trial(sampled, profile, each, lambda _: None) for each in plan_samples(sampled, profile, concurrency)
    ]
    whole = run_trial(recording, profile, plan_whole(recording, concurrency, samples), lambda _: None)
    return advise(recording, LogFacts(), profile, samples, whole, concurrency)


def few_requests():
    return recording_of(repeated_requests(4, 20))


def test_repeated_outputs_pay(monkeypatch):
    recording = recording_of(repeated_requests())
    advice = advice_of(recording)
    assert advice.verdict.startswith("Drafting is worthwhile")
    assert advice.best.speedup > 2
    assert advice.growth[0][1] < 2 < advice.growth[-1][1]
    assert sum(group.share for group in advice.sizes) == pytest.approx(1)
    assert advice.other_users is None
    assert [size.name for size in advice.sizes] == ["60 output tokens"]
    assert "not reliable, because the log has only 2,400 output tokens; give a log with at least" in advice.verdict
    monkeypatch.setattr("drafter_service.commands.advise.advice.MIN_RELIABLE_TOKENS", 2400)
    assert "not reliable" not in advice_of(recording, sampled=few_requests()).verdict


def test_the_headline_is_for_paths_where_trees_would_gain_more():
    """Each word of an output is followed by one of two, which a path cannot both draft."""
    rng = np.random.default_rng(0)
    requests = []
    for _ in range(30):
        words, last = [], 0
        for _ in range(20):
            last = 1 + (2 * last + int(rng.integers(2))) % 30
            words += [100 * last + offset for offset in range(4)]
        requests.append(([7, 8, 9], words))
    advice = advice_of(recording_of(requests))
    [tree] = [one for one in advice.speedups if (one.trial.draft_shape, one.trial.concurrency) == ("tree", 1)]
    assert (advice.best.trial.draft_shape, advice.settings.draft_shape) == ("path", "path")
    assert advice.best.speedup < tree.speedup
    assert any(f"such as SGLang, would gain more: {tree.speedup:.2f}x" in note for note in advice.notes)
    assert any("device waits for the host" in note for note in advice.notes)
    assert any("vLLM starts only if --max-num-batched-tokens" in note for note in advice.notes)


def test_random_outputs_do_not_pay():
    requests = [(prompt, output[: 10 * (1 + number % 3)]) for number, (prompt, output) in enumerate(random_requests())]
    advice = advice_of(recording_of(requests), sampled=few_requests())
    assert advice.verdict.startswith("Drafting is not worthwhile")
    assert advice.best.counts.tokens_per_step == pytest.approx(1, abs=0.02)
    assert advice.kept == [], "without sources there is no capacity curve"
    assert sum(group.requests for group in advice.sizes) == len(requests)
    assert [group.name for group in advice.sizes] == ["10 output tokens", "20 output tokens", "30 output tokens"]


def test_text_of_other_users_is_told_apart():
    requests = repeated_requests()
    for users, most in ((5, 1.0), (2, 0.0)):
        recording = recording_of(requests, users=[number % users for number in range(40)])
        share = advice_of(recording, sampled=few_requests()).other_users
        assert most / 2 <= share <= most


def test_capacity_covers_the_age_of_sources():
    """Outputs that repeat one from long ago need a corpus that still has it."""
    old, noise = repeated_requests(2, 200), random_requests(20, 200, seed=1)
    advice = advice_of(recording_of([*old, *noise, *old]), sampled=few_requests())
    ages = [age for age, share in advice.kept if share >= 0.98]
    assert ages[0] >= 20 * 200


@pytest.fixture
def profile(tmp_path):
    path = tmp_path / "profile.json"
    CHEAP.write(path)
    return path


def run(*arguments):
    return CliRunner().invoke(cli, ["advise", *map(str, arguments)])


def test_the_command_writes_a_page_and_settings_that_the_service_takes(tmp_path, profile):
    log = write_log(
        tmp_path / "log.jsonl",
        repeated_requests(),
        created=[1_700_000_000 + number for number in range(40)],
        duration_s=[2.5] * 40,
        user=[f"u{number % 5}" for number in range(40)],
        session_id=[f"s{number}" for number in range(40)],
    )
    page, settings = tmp_path / "a.html", tmp_path / "a.toml"
    result = run("--from", log, "--cost-profile", profile, "--out", page, "--write-config", settings)
    assert result.exit_code == 0, result.output
    assert "Drafting is worthwhile" in result.output
    assert "with 3 requests at once" in " ".join(result.output.split())
    assert "another user's text" in result.output
    assert "another session's text" in result.output
    drafting = load_settings(settings).drafting
    assert (drafting.draft_shape, drafting.max_draft) == ("path", 16)
    assert load_settings(settings).steps.cost_profile == profile
    assert "docs/hosts/vllm.md): --async-scheduling --scheduler-cls" in result.stdout
    assert '"num_speculative_tokens": 16' in result.stdout
    assert "paths padded to 16 tokens, as vLLM verifies them" in " ".join(result.stdout.split())
    text = page.read_text()
    assert "tokens per step" in text
    assert "While the corpus grows" in text
    assert page_faults(page) == []
    assert re.findall("wrote (.*)", result.stderr) == [str(page), str(settings)]
    rows = re.findall(r"^ *(?:ssd|ngram|classic|arctic) .*", result.stdout, re.MULTILINE)
    settings_of = [tuple(row.split()[:4]) for row in rows]
    assert len(settings_of) == len({*settings_of}) > 10
    assert all(word in result.stdout for head in HEADS for word in head.split()), "headings are not cut off"
    assert max(len(line) for line in result.stdout.splitlines() if not line.startswith("vLLM 0.33")) <= 80


def test_tokens_of_the_log_are_in_no_file_with_a_name(tmp_path, profile, monkeypatch):
    folder, seen = tmp_path / "temporary", []
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))

    def list_folder(recording, *rest):
        seen.append((isinstance(recording.tokens, np.memmap), os.listdir(folder)))
        return run_trial(recording, *rest)

    monkeypatch.setattr(trials, "run_trial", list_folder)
    log = write_log(tmp_path / "log.jsonl", repeated_requests(4, 20))
    assert run("--from", log, "--cost-profile", profile).exit_code == 0
    assert {(is_mapped, *names) for is_mapped, names in seen} == {(True,)}


def test_an_interruption_writes_nothing(tmp_path, profile, monkeypatch):
    def interrupt(*_arguments):
        raise KeyboardInterrupt

    monkeypatch.setattr(trials, "run_trial", interrupt)
    log, page = write_log(tmp_path / "log.jsonl", repeated_requests(2)), tmp_path / "a.html"
    result = run("--from", log, "--cost-profile", profile, "--out", page)
    assert (result.exit_code, page.exists()) == (2, False)
    assert "interrupted; nothing was written" in result.output
    # Before the log is read.
    for out, settings in ((page, tmp_path / "no" / "a.toml"), (tmp_path / "no" / "a.html", tmp_path / "a.toml")):
        result = run("--from", log, "--out", out, "--write-config", settings)
        assert "cannot write" in result.output
    assert not page.exists()


def test_no_text_appears_in_the_page(tmp_path, profile):
    secret = "the secret words of a user "
    lines = [json.dumps({"prompt": f"{secret}{number}", "completion": secret * 10}) for number in range(4)]
    log = tmp_path / "log.jsonl"
    log.write_text("\n".join(lines))
    page, model = tmp_path / "a.html", model_folder(tmp_path / "model")
    result = run("--from", log, "--tokenizer", model, "--cost-profile", profile, "--out", page)
    assert result.exit_code == 0, result.output
    assert "secret" not in page.read_text() + result.stdout
    assert "    the secret words" in result.stderr, "excerpts of what was found"
    quiet = run("--from", log, "--tokenizer", model, "--cost-profile", profile, "--quiet", "--dry-run")
    assert quiet.exit_code == 0
    assert "secret" not in quiet.output


@pytest.mark.parametrize(
    ("name", "content", "expected"),
    [
        ("a.jsonl", "", "no request with an output"),
        ("a.jsonl", '{"prompt": "a"}\n', "a.jsonl:1"),
        ("a.log", "INFO 11-22 Received request cmpl-1: prompt: 'a', params: SamplingParams()\n" * 3, VLLM_LOG),
    ],
)
def test_logs_without_outputs_are_refused_with_the_formats_that_work(tmp_path, profile, name, content, expected):
    log = tmp_path / name
    log.write_text(content)
    result = run("--from", log, "--out", tmp_path / "a.html")
    assert result.exit_code == 2
    assert expected in " ".join(result.stderr.split())
    assert "prompt_token_ids" in result.stderr
    result = run("--from", log, "--cost-profile", profile, "--gpu", "h100")
    assert "either --cost-profile or --gpu" in result.stderr


def test_odd_logs_are_described(tmp_path, profile, monkeypatch):
    requests = repeated_requests(6)
    log = write_log(tmp_path / "log.jsonl", requests, created=[5, 4, 3, 2, 1, 0])
    lines = log.read_text().replace('"r0"', '"request-0"').splitlines()
    log.write_text("\n".join([*lines, lines[0], "not JSON"]))
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    result = run("--from", log, "--cost-profile", profile, "--concurrency", 2)
    assert result.exit_code == 0, result.output
    assert sorted(tmp_path.iterdir()) == before, "a file was written that no option names"
    for words in ("could not be read: 1: not JSON (", "sorted by time: 5", "of an earlier one: 1"):
        assert words in " ".join(result.output.split())


def test_speedups_beyond_the_cost_profile_are_said_to_be_extrapolated():
    profile = CostProfile("test", "tiny", {1: {1: 100.0}, 64: {1: 110.0, 4: 120.0}})
    recording = few_requests()
    for concurrency, is_extrapolated in ((2, False), (8, True)):
        advice = advice_of(recording, concurrency, profile)
        assert {one.trial.concurrency for one in advice.speedups} == {1, 4, concurrency}
        assert any("extrapolated" in note for note in advice.notes) == is_extrapolated
