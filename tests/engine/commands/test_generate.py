"""The `generate` command, from arguments to output."""

import io
import json
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models

from drafter_service.client import DrafterClient
from engine.commands import launch
from engine.commands import main as cli
from engine.commands.generate import CompletionWriter
from engine.drafters.model_free.none import NoDrafter
from engine.drafters.registry import KINDS
from engine.drafters.sources import DraftSource
from engine.models.tokenizer import Tokenizer
from engine.sampling.seeds import sample_seed
from ssd.types import ROOT
from tests.engine.conftest import make_folder
from tests.engine.drafters.toy import ToyDrafter
from tests.engine.lora_folders import write_adapter
from tests.engine.models.quantized.formats import FORMATS, edit, quantize_folder
from tests.servers import served
from tests.strategies import array

PROMPT = "def add(left, right):"
SAMPLING_DRAFTER = f"{__name__}:SamplingDrafter"


@pytest.fixture
def run(monkeypatch, capsys):
    """Run the command line in this process; returns exit code, stdout and stderr."""

    def run(*arguments, stdin=None):
        monkeypatch.setattr(sys, "argv", ["ssd-engine", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", stdin if isinstance(stdin, io.StringIO) else io.StringIO(stdin or ""))
        with pytest.raises(SystemExit) as ended:
            cli.main()
        captured = capsys.readouterr()
        return ended.value.code or 0, captured.out, captured.err

    return run


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def completions(path):
    """Return the records without the figures of their drafts, which may differ between runs."""
    return [{name: value for name, value in record.items() if name != "draft"} for record in records(path)]


def test_prompts_from_arguments(run, model_folder):
    code, out, err = run("generate", "--model", model_folder, "--max-tokens", 5, PROMPT, "class Pair:")
    assert code == 0
    assert out.startswith(PROMPT)
    assert "class Pair:" in out
    for word in ("2 outputs", "tokens/s", "tokens per step", "drafted", "accepted"):
        assert word in err


def test_prompts_from_files_and_stdin_are_the_same_prompts(run, model_folder, tmp_path):
    base = ("generate", "--model", model_folder, "--max-tokens", 8)
    (tmp_path / "prompts.txt").write_text(f"{PROMPT}\n\nclass Pair:\n")
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": p}) + "\n" for p in (PROMPT, "class Pair:")))
    outputs = []
    for name, arguments, stdin in (
        ("args", (PROMPT, "class Pair:"), None),
        ("text", ("--file", tmp_path / "prompts.txt"), None),
        ("jsonl", ("--file", tmp_path / "prompts.jsonl"), None),
    ):
        assert run(*base, *arguments, "--out", tmp_path / name, stdin=stdin)[0] == 0
        outputs.append([line["tokens"] for line in completions(tmp_path / name)])
    assert run(*base, "--out", tmp_path / "stdin", stdin=PROMPT)[0] == 0
    assert run(*base, "--out", tmp_path / "dash", "--file", "-", stdin=PROMPT)[0] == 0
    assert outputs[0] == outputs[1] == outputs[2]
    assert [line["tokens"] for line in completions(tmp_path / "stdin")] == outputs[0][:1]
    assert [line["tokens"] for line in completions(tmp_path / "dash")] == outputs[0][:1]


def test_every_drafter_gives_the_same_output(
    run, model_folder, tmp_path, server, socket_address, draft_folders, corpus_file
):
    for temperature in (0, 1):
        outputs = {}
        for drafter in KINDS:
            options = ("--drafter", drafter, "--address", socket_address, "--temperature", temperature)
            limits = ("--max-tokens", 30, "--out", tmp_path / drafter)
            if drafter in draft_folders:
                options += ("--draft-model", draft_folders[drafter])
            if drafter == "rest":
                options += ("--drafter-option", f"path={corpus_file}")
            code, _, err = run("generate", "--model", model_folder, *options, *limits, PROMPT, PROMPT, "class")
            assert code == 0, err
            outputs[drafter] = completions(tmp_path / drafter)
        assert all(output == outputs["none"] for output in outputs.values())


class SamplingDrafter(ToyDrafter):
    """A third-party drafter that samples its tokens; the option `depth` is the number of tokens."""

    def __init__(self, config, target):
        super().__init__(config, target, depth=int(config.options.get("depth", 3)))


@pytest.fixture
def verify_all_drafts(monkeypatch):
    """Verify every draft token, so that results do not depend on the time that steps take."""
    build = launch.build_engine
    monkeypatch.setattr(launch, "build_engine", lambda *given, has_budget, **more: build(*given, **more))


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


class TwoSources(ToyDrafter):
    """Drafts 2 tokens, as if the first came from an MTP layer and the second from a network without a known source."""

    def __init__(self, config, target):
        super().__init__(config, target, depth=2)

    def propose(self, plan):
        drafts = super().propose(plan)
        source = np.where(drafts.batch.parents == ROOT, DraftSource.MTP, DraftSource.OTHER).astype(np.uint8)
        return replace(drafts, batch=replace(drafts.batch, source=source))


@pytest.mark.usefixtures("verify_all_drafts")
def test_lines_choose_their_drafters_and_drafts_are_reported_by_source(run, model_folder, tmp_path):
    kind = f"{__name__}:TwoSources"
    settings = [{}, {"drafter": kind, "max_draft": 1}, {"drafter": "none"}, {"max_draft": 0}, {"source": 5}]
    lines = [json.dumps({"prompt": PROMPT} | each) for each in settings]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    arguments = ("--file", tmp_path / "prompts.jsonl", "--out", tmp_path / "out", "--max-tokens", 30, "--ignore-eos")
    # One at a time, since the toy drafts equally many tokens for all sequences of a step.
    code, _, err = run("generate", "--model", model_folder, "--drafter", kind, "--max-sequences", 1, *arguments)
    assert code == 0, err
    drafts = [record["draft"] for record in records(tmp_path / "out")]
    assert len({tuple(record["tokens"]) for record in records(tmp_path / "out")}) == 1
    assert [list(draft["by_source"]) for draft in drafts] == [["mtp", "other"], ["mtp"], [], [], ["mtp", "other"]]
    for draft in drafts:
        assert draft["tokens_per_step"] == pytest.approx(30 / draft["steps"], abs=1e-3)
        for figure in ("drafted_tokens", "accepted_tokens"):
            assert sum(counts[figure] for counts in draft["by_source"].values()) == draft[figure]
    by_source = err[err.index("by source: ") :]
    for name in ("mtp", "other"):
        drafted = sum(draft["by_source"].get(name, {"drafted_tokens": 0})["drafted_tokens"] for draft in drafts)
        assert f"{name}: {drafted} drafted, " in " ".join(by_source.split())


@pytest.mark.usefixtures("verify_all_drafts")
def test_a_line_chooses_its_verification(run, model_folder, tmp_path):
    lines = [{"prompt": PROMPT, "verification": verification} for verification in (None, "rejection")]
    (tmp_path / "prompts.jsonl").write_text("\n".join(map(json.dumps, lines)))

    def outputs(drafter):
        settings = ("--drafter", drafter, "--temperature", 0.8, "--max-tokens", 40, "--out", tmp_path / "out")
        code, _, err = run("generate", "--model", model_folder, "--file", tmp_path / "prompts.jsonl", *settings)
        assert code == 0, err
        return [line["tokens"] for line in completions(tmp_path / "out")]

    plain, sampled = outputs("none"), outputs(SAMPLING_DRAFTER)
    assert [left == right for left, right in zip(plain, sampled, strict=True)] == [True, False]


def test_lines_choose_their_adapters(run, model_folder, tmp_path):
    for seed, name in enumerate("ab"):
        write_adapter(tmp_path / name, model_folder, seed=seed)
    adapters = ("--lora", f"a={tmp_path / 'a'}", "--lora", f"b={tmp_path / 'b'}", "--max-loras", "1")
    texts = {}
    for name in (None, "a", "b"):
        chosen = () if name is None else ("--adapter", name)
        code, texts[name], err = run(
            "generate", "--model", model_folder, "--max-tokens", "9", *adapters, *chosen, PROMPT
        )
        assert (code, "warning" in err) == (0, False)
    assert len(set(texts.values())) == 3
    names = ["b", None, "a", "b"]
    lines = [json.dumps({"prompt": PROMPT} | ({} if name is None else {"adapter": name})) for name in names]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    run("generate", "--model", model_folder, "--max-tokens", "9", *adapters, "--file", tmp_path / "prompts.jsonl",
        "--out", tmp_path / "out.jsonl")  # fmt: skip
    assert [f"{PROMPT}{record['completion']}\n" for record in records(tmp_path / "out.jsonl")] == [
        texts[name] for name in names
    ]


def test_a_single_source_is_not_reported_twice(run, model_folder):
    _, _, err = run("generate", "--model", model_folder, "--drafter", "ngram", "--max-tokens", 5, PROMPT)
    assert "by source" not in err


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
    assert run(*base, "--drafter-option", "match_depth=8", "--drafter-option", "capacity=5000")[0] == 0
    assert (made[0].match_depth, made[0].capacity) == (8, 5000)


def test_completions_can_be_lines_on_stdout(run, model_folder):
    code, out, _ = run("generate", "--model", model_folder, "--max-tokens", 3, "--logprobs", 1, "--out", "-", PROMPT)
    [line] = out.splitlines()
    assert code == 0
    assert len(json.loads(line)["logprobs"]) == 3


def test_only_newlines_separate_the_prompts_of_a_file(run, model_folder, tmp_path):
    (tmp_path / "prompts.txt").write_text("a\x0cb\u2028c\nd\n", encoding="utf-8")
    arguments = ("--file", tmp_path / "prompts.txt", "--out", tmp_path / "out", "--max-tokens", 1)
    assert run("generate", "--model", model_folder, *arguments)[0] == 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == ["a\x0cb\u2028c", "d"]


def test_a_prompt_given_twice_is_sampled_twice(run, model_folder, tmp_path):
    arguments = ("--temperature", 1, "--out", tmp_path / "out", "--max-tokens", 30, PROMPT, PROMPT)
    assert run("generate", "--model", model_folder, *arguments)[0] == 0
    first, second = (line["tokens"] for line in completions(tmp_path / "out"))
    assert first != second


def test_an_interrupted_run_writes_finished_completions(run, model_folder, tmp_path, monkeypatch):
    from engine.engine import Engine

    arguments = ("--out", tmp_path / "out", "--max-tokens", 5, "--max-sequences", 1, "--drafter", "none")
    step, steps = Engine.step, iter(range(1000))

    def step_or_stop(engine):
        if next(steps) == 12:
            raise KeyboardInterrupt
        return step(engine)

    monkeypatch.setattr(Engine, "step", step_or_stop)
    assert run("generate", "--model", model_folder, *arguments, "a", "b", "c", "d")[0] != 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == ["a", "b"]


def test_an_interruption_while_a_completion_is_written_does_not_lose_it(run, model_folder, tmp_path, monkeypatch):
    text, interruptions = CompletionWriter._text, iter([KeyboardInterrupt])

    def text_or_stop(writer, index):
        for interruption in interruptions:
            raise interruption
        return text(writer, index)

    monkeypatch.setattr(CompletionWriter, "_text", text_or_stop)
    arguments = ("--out", tmp_path / "out", "--max-tokens", 5, "--max-sequences", 1)
    assert run("generate", "--model", model_folder, *arguments, "a", "b")[0] != 0
    assert [line["index"] for line in completions(tmp_path / "out")] == [0]


def test_completions_are_in_the_order_of_their_prompts(run, model_folder, tmp_path):
    prompts = [f"def f{number}():" for number in range(9)]
    arguments = ("--out", tmp_path / "out", "--max-tokens", 20, "--max-sequences", 3, "--temperature", 1)
    assert run("generate", "--model", model_folder, *arguments, *prompts)[0] == 0
    assert [line["prompt"] for line in completions(tmp_path / "out")] == prompts


def test_a_completion_keeps_its_leading_space(tmp_path):
    pieces = {"<unk>": 0, "\u2581hello": 1, "\u2581world": 2}
    hub = HubTokenizer(models.WordLevel(pieces, unk_token="<unk>"))
    hub.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    hub.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode(array([2])) == "world"
    assert tokenizer.decode_behind(array([1]), array([2])) == " world"


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


def test_prompts_can_be_token_ids(run, model_folder, tmp_path):
    (tmp_path / "ids.jsonl").write_text('{"prompt": [5, 6, 7]}\n')
    code, out, _ = run("generate", "--model", model_folder, "--file", tmp_path / "ids.jsonl", "--max-tokens", 3)
    assert code == 0
    assert out.startswith("<3 token ids>")


BAD_INPUT = {
    "empty prompt": ((), [""], "prompt 1: the prompt is empty"),
    "second prompt empty": ((), ["x", ""], "prompt 2: the prompt is empty"),
    "prompt too long": ((), ["x " * 2000], "context window of 512"),
    "drafter option without a value": (("--drafter-option", "x"), ["x"], "--drafter-option must be KEY=VALUE, not 'x'"),
    "unknown drafter option": (("--drafter-option", "x=1"), ["x"], "the drafter ssd has no option x; give "),
    "no such file": (("--file", "{tmp}/missing.txt"), [], "cannot read"),
    "empty file": (("--file", "{tmp}/empty.txt"), [], "has no prompt"),
    "log-probabilities without an output file": (("--logprobs", "1"), [PROMPT], "give a file, or - for stdout"),
    "no such folder": (("--model", "/no/such"), [PROMPT], "no model folder /no/such; give a Hugging Face folder, or"),
    "file that is not text": (("--file", "{tmp}/binary.txt"), [], "is not text in UTF-8"),
    "line that is not JSON": (("--file", "{tmp}/bad.jsonl"), [], "line 1 is not a JSON object"),
    "prompt of another type": (("--file", "{tmp}/type.jsonl"), [], "line 1: `prompt` must be"),
    "drafter of another type": (("--file", "{tmp}/drafter.jsonl"), [], "line 2: `drafter` must be text"),
    "longest draft of another type": (("--file", "{tmp}/max.jsonl"), [], "line 1: `max_draft` must be a whole number"),
    "unknown verification": (("--file", "{tmp}/verification.jsonl"), [], "prompt 1: verification must be exact or"),
    "token outside the vocabulary": (("--file", "{tmp}/ids.jsonl"), [], "vocabulary ends at 299"),
    "token id out of range": (("--file", "{tmp}/negative.jsonl"), [], "line 1: `prompt` must be"),
    "prompts twice": (("--file", "{tmp}/empty.txt"), ["x"], "not both"),
    "no sidecar": (("--drafter", "ssd-remote", "--address", "unix:{tmp}/none.sock"), ["x"], "no drafter answers at"),
    "no address": (("--drafter", "ssd-remote", "--address", "nonsense"), ["x"], "is not an address"),
    "no model": (("--model", "{tmp}/nothing"), ["x"], "no model folder"),
    "output in no folder": (("--out", "{tmp}/no/such/folder"), ["x"], "cannot write"),
    "output that is a folder": (("--out", "{tmp}"), ["x"], "cannot write"),
    "bytes that are not text": ((), ["\udcff"], "prompt 1: the prompt is not valid Unicode"),
    "text that is not Unicode": (("--file", "{tmp}/surrogate.jsonl"), [], "prompt 1: the prompt is not valid Unicode"),
    "disk full": (("--out", "/dev/full", "--max-tokens", "1"), ["x"], "cannot write /dev/full"),
    "seed out of range": (("--seed", "99999999999999999999"), ["x"], "seed must fit"),
    "top-p out of range": (("--top-p", "0"), ["x"], "top_p must be above 0"),
    "no tokens": (("--max-tokens", "0"), ["x"], "max_tokens must be at least 1"),
    "an empty stop string": (("--stop", ""), ["x"], "stop must be"),
    "a bias out of range": (("--logit-bias", "5=101"), ["x"], "logit_bias of token 5 must be"),
    "a bias without a number": (("--logit-bias", "5"), ["x"], "such as 42=-100, not '5'"),
    "a bias of an invalid token": (("--logit-bias", "x=5"), ["x"], "such as 42=-100, not 'x=5'"),
    "a bias of a token outside the vocabulary": (("--logit-bias", "300=5"), ["x"], "prompt 1: logit_bias holds"),
    "too many alternatives": (("--prompt-logprobs", "21"), ["x"], "prompt_logprobs must be"),
    "a second prompt that is too long": (("--n", "2"), ["x", "x " * 2000], "prompt 2: the prompt has"),
    "too many threads": (("--threads", "100000"), ["x"], "--threads 100000: give at most"),
    "an adapter without a folder": (("--lora", "a"), ["x"], "--lora must be NAME=FOLDER, not 'a'"),
    "two adapters of a name": (("--lora", "a=x", "--lora", "a=y"), ["x"], "two adapters of the name a"),
    "an unknown adapter": (("--adapter", "a"), ["x"], "prompt 1: there is no adapter 'a'; this engine has none"),
    "an unknown adapter of a line": (("--file", "{tmp}/adapter.jsonl"), [], "prompt 2: there is no adapter 'a'"),
    "no prompt on stdin": ((), [], "no prompt; give one as an argument, with --file, or on stdin"),
    "a device without data": (("--device", "meta"), ["x"], "--device meta: PyTorch finds no such device"),
    "a stop token outside the vocabulary": (("--stop-token-id", "300"), ["x"], "prompt 1: stop_token_ids holds"),
}


@pytest.mark.parametrize(("options", "prompts", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_gives_a_one_line_error_and_exit_code_2(run, model_folder, tmp_path, options, prompts, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "type.jsonl").write_text('{"prompt": 5}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 300]}\n')
    (tmp_path / "drafter.jsonl").write_text('{"prompt": "x", "drafter": "none"}\n{"prompt": "y", "drafter": 1}\n')
    (tmp_path / "max.jsonl").write_text('{"prompt": "x", "max_draft": true}\n')
    (tmp_path / "verification.jsonl").write_text('{"prompt": "x", "verification": "greedy"}\n')
    (tmp_path / "adapter.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x", "adapter": "a"}\n')
    (tmp_path / "surrogate.jsonl").write_text('{"prompt": "\\ud800"}\n')
    (tmp_path / "negative.jsonl").write_text('{"prompt": [-1]}\n')
    options = [option.format(tmp=tmp_path) for option in options]
    code, out, err = run("generate", "--model", model_folder, *options, *prompts)
    assert code == 2
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in err
    assert out == ""


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--device", "nonsense"), "--device nonsense"),
        (("--attention", "flashinfer"), "--attention flashinfer needs a CUDA device"),
        (("--threads", 100_000), "--threads"),
        (("--drafter", "rest"), "it needs a corpus; give --drafter-option path=SNAPSHOT"),
        (("--drafter", "rest", "--drafter-option", "path=absent.txt"), "absent.txt: cannot be read"),
        (("--drafter", "ssd+lookahead", "--drafter-option", "window=1"), "--drafter lookahead: window must be 2 to 64"),
        (("--lora", "a=absent"), "--lora a: there is no folder absent"),
        (("--lora", "a=absent", "--in-flight", "1"), "--in-flight 1 cannot be combined with --lora"),
    ],
)
def test_errors_that_do_not_depend_on_the_model_are_raised_before_loading_it(
    run, model_folder, monkeypatch, options, message
):
    monkeypatch.setattr("engine.commands.launch.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    code, _, err = run("generate", "--model", model_folder, "--device", "cpu", *options, "x")
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"drafter": "mtp"}, "prompt 2: drafter must be ssd or none; 'mtp' is not loaded"),
        ({"max_draft": 5}, "prompt 2: max_draft must be 0 to 4, not 5"),
    ],
)
def test_choices_of_a_line_are_checked_before_the_model_is_loaded(
    run, model_folder, tmp_path, monkeypatch, line, message
):
    monkeypatch.setattr("engine.commands.launch.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    (tmp_path / "prompts.jsonl").write_text('{"prompt": "x"}\n' + json.dumps({"prompt": "x"} | line))
    code, _, err = run("generate", "--model", model_folder, "--max-draft", 4, "--file", tmp_path / "prompts.jsonl")
    assert (code, message in " ".join(err.split())) == (2, True)


def test_the_summary_uses_singular_and_plural(run, model_folder):
    _, _, err = run("generate", "--model", model_folder, "--max-tokens", 1, PROMPT)
    assert "1 output, 1 token in" in err


def test_outputs_that_the_context_window_limits_are_announced(run, model_folder):
    _, out, err = run("generate", "--model", model_folder, "--max-tokens", 100_000, "--stop", "e", PROMPT, "x = 1")
    assert out.startswith(PROMPT)
    assert len(re.findall(r"note: prompt [12] leaves room for \d+ of 100,000 tokens", " ".join(err.split()))) == 2
    assert "note" not in run("generate", "--model", model_folder, "--max-tokens", 1, PROMPT)[2]


def test_a_missing_prompt_at_a_terminal_is_an_error(run, model_folder):
    class Terminal(io.StringIO):
        def isatty(self):
            return True

    code, _, err = run("generate", "--model", model_folder, stdin=Terminal())
    assert code == 2
    assert "no prompt" in err


@pytest.mark.usefixtures("verify_all_drafts")
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
    with served("--listen", socket_address, "--capacity", "100k") as process:
        remote = ("--drafter", "ssd-remote", "--address", socket_address, "--out", tmp_path / "remote")
        code, _, err = run("generate", "--model", model_folder, *remote, *options)
    assert next(steps) > 10
    assert code == 0
    assert " ".join(err.split()).count("continuing without drafts") == 1
    assert completions(tmp_path / "remote") == completions(tmp_path / "plain")


def test_help_imports_nothing_heavy():
    """The help page imports neither torch nor numba."""
    script = (
        "import sys; from click.testing import CliRunner; from engine.commands.main import cli;"
        "result = CliRunner().invoke(cli, ['--help']); assert result.exit_code == 0, result.output;"
        "assert not {'numba', 'torch', 'grpc', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("3",), "--tensor-parallel 3 does not divide the model's num_heads, 4"),
        (("2", "--in-flight", "1"), "--in-flight 1 cannot be combined with --tensor-parallel 2"),
        (("2", "--lora", "a=absent"), "--lora cannot be combined with --tensor-parallel 2"),
        (("2", "--drafter", "self-int8"), "--drafter self-int8 reads the keys and values of the whole target"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_their_weights_are_read(
    run, model_folder, tmp_path, options, reason
):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    code, _, err = run("generate", "--model", tmp_path, "--tensor-parallel", *options, PROMPT)
    assert code == 2
    assert reason in " ".join(err.split())
    assert "Traceback" not in err


def test_quantized_weights_run_with_a_warning_or_are_refused(run, tmp_path):
    make_folder(tmp_path)
    quantize_folder(tmp_path, FORMATS["vLLM's fp8"])
    arguments = ("generate", "--model", tmp_path, "--max-tokens", 3, PROMPT)
    code, _, err = run(*arguments, "--drafter", "none")
    assert code == 0
    assert "warning: config.json requires activations in fp8, which" in err
    code, _, err = run(*arguments, "--drafter", "self-int8")
    assert code == 2
    assert err.startswith("error: --drafter self-int8 rounds the weights of the target, but those of")
    edit(tmp_path, quantization_config={"quant_method": "gptq", "bits": 4})
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("error: config.json describes quantized weights ('gptq'), which this engine does not read;")
    assert err.count("\n") == 1
