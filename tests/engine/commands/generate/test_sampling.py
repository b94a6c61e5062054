"""Sampling options of the `generate` command."""

import json

import pytest

from engine.models.tokenizer import Tokenizer
from engine.sampling.seeds import sample_seed
from tests.engine.commands.generate.outputs import PROMPT, completions


def test_every_sampling_option_reaches_the_request(run, model_folder, monkeypatch):
    from engine.commands import generate
    from engine.scheduling.request import SamplingParams

    received = []
    monkeypatch.setattr(generate, "run_generate", lambda options: received.append(options.sampling))
    given = {
        "max_tokens": 7,
        "min_tokens": 2,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "seed": 5,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    flags += ["--stop", "a", "--stop", "b", "--stop-token-id", 8, "--ignore-eos"]
    flags += ["--logit-bias", "7=-1.5", "--logit-bias", "9=3"]
    assert run("generate", *flags, "x")[0] == 0
    assert run("generate", "x")[0] == 0
    expected = SamplingParams(
        **given, stop=("a", "b"), stop_token_ids=(8,), ignore_eos=True, logit_bias={7: -1.5, 9: 3}
    )
    assert received == [expected, SamplingParams()]


def test_a_stop_string_ends_the_output_before_it(run, model_folder, tmp_path):
    base = ("generate", "--model", model_folder, "--max-tokens", 60, "--temperature", 1, "--seed", 4, PROMPT)
    assert run(*base, "--out", tmp_path / "plain")[0] == 0
    [plain] = completions(tmp_path / "plain")
    stop = plain["completion"][10:13]
    assert run(*base, "--stop", stop, "--stop", "never said", "--out", tmp_path / "stopped")[0] == 0
    [stopped] = completions(tmp_path / "stopped")
    assert stopped["completion"] == plain["completion"][: plain["completion"].index(stop)]
    assert (stopped["finish_reason"], stopped["stop_reason"]) == ("stop", stop)
    assert stopped["tokens"] == plain["tokens"][: len(stopped["tokens"])]
    token = plain["tokens"][5]
    assert run(*base, "--stop-token-id", token, "--out", tmp_path / "at token")[0] == 0
    [at_token] = completions(tmp_path / "at token")
    assert at_token["stop_reason"] == at_token["tokens"][-1] == token
    assert plain["completion"].startswith(at_token["completion"])
    assert len(at_token["completion"]) < len(plain["completion"])


def test_log_probabilities_are_written_with_the_tokens(run, model_folder, tmp_path):
    arguments = ("--max-tokens", 6, "--logprobs", 2, "--out", tmp_path / "out", PROMPT)
    assert run("generate", "--model", model_folder, *arguments)[0] == 0
    [line] = completions(tmp_path / "out")
    assert len(line["logprobs"]) == len(line["tokens"])
    for token, record in zip(line["tokens"], line["logprobs"], strict=True):
        assert record["rank"] == 1  # greedy
        assert record["top"][0] == [token, record["logprob"]]
        assert len(record["top"]) == 2


def test_prompt_log_probabilities_equal_those_of_the_same_output(run, model_folder, tmp_path):
    given = ("generate", "--model", model_folder, "--drafter", "none")
    output = ("--max-tokens", 6, "--logprobs", 2, "--out", tmp_path / "out")
    assert run(*given, *output, PROMPT)[0] == 0
    [generated] = completions(tmp_path / "out")
    assert "prompt_logprobs" not in generated
    tokens = Tokenizer(model_folder).encode(PROMPT).tolist()
    (tmp_path / "whole.jsonl").write_text(json.dumps({"prompt": tokens + generated["tokens"]}) + "\n")
    scored = ("--file", tmp_path / "whole.jsonl", "--prompt-logprobs", 2, "--out", tmp_path / "scored")
    assert run(*given, "--max-tokens", 1, *scored)[0] == 0
    [line] = completions(tmp_path / "scored")
    assert line["prompt_tokens"] == tokens + generated["tokens"]
    assert len(line["prompt_logprobs"]) == len(line["prompt_tokens"])
    assert line["prompt_logprobs"][0] is None
    for mine, theirs in zip(line["prompt_logprobs"][len(tokens) :], generated["logprobs"], strict=True):
        assert mine["logprob"] == pytest.approx(theirs["logprob"], abs=1e-4)
        assert [token for token, _ in mine["top"]] == [token for token, _ in theirs["top"]]
    assert "logprobs" not in line


def test_a_logit_bias_determines_the_output(run, model_folder, tmp_path):
    arguments = ("--drafter", "none", "--max-tokens", 4, "--logit-bias", "17=100", "--out", tmp_path / "out", PROMPT)
    assert run("generate", "--model", model_folder, *arguments)[0] == 0
    assert completions(tmp_path / "out")[0]["tokens"] == [17] * 4


def test_samples_of_a_prompt_have_different_seeds(run, model_folder, tmp_path):
    base = ("generate", "--model", model_folder, "--drafter", "none", "--temperature", 1, "--max-tokens", 12)
    given = (*base, PROMPT, "class Pair:")
    assert run(*given, "--out", tmp_path / "one")[0] == 0
    assert run(*given, "--n", 3, "--max-sequences", 2, "--out", tmp_path / "three")[0] == 0
    three = completions(tmp_path / "three")
    assert [(line["index"], line["sample"]) for line in three] == [(i, k) for i in range(2) for k in range(3)]
    assert [line["prompt"] for line in three] == [PROMPT] * 3 + ["class Pair:"] * 3
    assert three[::3] == completions(tmp_path / "one")
    assert len({tuple(line["tokens"]) for line in three}) == 6
    # The same seeds as in the server.
    assert run(*base, PROMPT, "--seed", sample_seed(0, 2), "--out", tmp_path / "third")[0] == 0
    assert completions(tmp_path / "third")[0]["tokens"] == three[2]["tokens"]
    code, out, err = run(*base, PROMPT, "--n", 2)
    assert (code, out.count(PROMPT)) == (0, 2)
    assert "2 outputs" in err
