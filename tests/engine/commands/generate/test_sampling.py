"""Sampling options of the `generate` command."""

from engine.scheduling.request import sample_seed
from tests.engine.commands.generate.outputs import PROMPT, completions


def test_every_sampling_option_reaches_the_request(run, model_folder, monkeypatch):
    from engine.commands import generate
    from engine.scheduling.request import SamplingParams

    received = []
    monkeypatch.setattr(generate, "run_generate", lambda *arguments: received.append(arguments[-1]))
    given = {
        "max_tokens": 7,
        "temperature": 0.5,
        "top_k": 3,
        "top_p": 0.9,
        "seed": 5,
    }
    flags = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    flags += ["--stop", "a", "--stop", "b", "--ignore-eos"]
    assert run("generate", *flags, "x")[0] == 0
    assert run("generate", "x")[0] == 0
    assert received == [SamplingParams(**given, stop=("a", "b"), ignore_eos=True), SamplingParams()]


def test_samples_and_repeated_prompts_have_different_seeds(run, model_folder, tmp_path):
    base = ("generate", "--model", model_folder, "--drafter", "none", "--temperature", 1, "--max-tokens", 12)
    given = (*base, PROMPT, PROMPT)
    assert run(*given, "--out", tmp_path / "one")[0] == 0
    assert run(*given, "--n", 3, "--max-sequences", 2, "--out", tmp_path / "three")[0] == 0
    three = completions(tmp_path / "three")
    assert [(line["index"], line["sample"]) for line in three] == [(i, k) for i in range(2) for k in range(3)]
    assert three[::3] == completions(tmp_path / "one")
    assert len({tuple(line["tokens"]) for line in three}) == 6
    # The same seeds as in the server.
    assert run(*base, PROMPT, "--seed", sample_seed(0, 2), "--out", tmp_path / "third")[0] == 0
    assert completions(tmp_path / "third")[0]["tokens"] == three[2]["tokens"]
    code, out, err = run(*base, PROMPT, "--n", 2)
    assert (code, out.count(PROMPT)) == (0, 2)
    assert "2 outputs" in err
