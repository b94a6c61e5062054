"""Input that the `generate` command refuses."""

import io
from pathlib import Path

import pytest

from engine.commands import launch
from engine.commands.options import EngineOptions
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.models.quantized_formats import FORMATS, quantize_folder

FILES = {
    "empty.txt": b"",
    "binary.txt": b"\xff\xfe\xfa",
    "bad.jsonl": b"{\n",
    "type.jsonl": b'{"prompt": [-1]}\n',
    "ids.jsonl": b'{"prompt": [1, 300]}\n',
    "field.jsonl": b'{"prompt": "a", "source": "a note"}\n{"prompt": "b", "max_tokens": 3}',
    "surrogate.jsonl": b'{"prompt": "\\ud800"}\n',
    "gguf/model.gguf": b"GGUF",
}
# Options, in which the file names above follow a slash; prompts; words of the error.
BAD_INPUT = [
    ("", [""], "prompt 1: the prompt is empty"),
    ("", ["x", ""], "prompt 2: the prompt is empty"),
    ("", ["x " * 2000], "context window of 512"),
    ("", ["x", "x " * 2000], "prompt 2: the prompt has"),
    ("", ["\udcff"], "prompt 1: the prompt is not valid Unicode"),
    ("--drafter-option x", ["x"], "--drafter-option must be KEY=VALUE, not 'x'"),
    ("--drafter-option x=1 --drafter-option x=2", ["x"], "x was given before"),
    ("--drafter-option x=1", ["x"], "the drafter ssd has no option x; give "),
    ("--drafter ssd-remote --address nonsense", ["x"], "is not an address"),
    ("--file /missing.txt", [], "cannot read"),
    ("--file /empty.txt", [], "has no prompt"),
    ("--file /empty.txt", ["x"], "not both"),
    ("--file /binary.txt", [], "is not text in UTF-8"),
    ("--file /bad.jsonl", [], "line 1 is not a JSON object"),
    ("--file /type.jsonl", [], "line 1: `prompt` must be"),
    ("--file /field.jsonl", [], "line 2: there is no field `max_tokens`; give prompt, source"),
    ("--file /ids.jsonl", [], "vocabulary ends at 299"),
    ("--file /surrogate.jsonl", [], "prompt 1: the prompt is not valid Unicode"),
    ("--model /no/such", ["x"], "no/such; give a Hugging Face folder, a GGUF file, or"),
    ("--model /", ["x"], "is not a model folder: it has no config.json; give a"),
    ("--model /gguf", ["x"], "it has no config.json; give the file "),
    ("--model /ids.jsonl", ["x"], "ids.jsonl is not a model folder; give the"),
    ("--out /no/such/folder", ["x"], "cannot write"),
    ("--out /", ["x"], "cannot write"),
    ("--out {full} --max-tokens 1", ["x"], "cannot write /dev/full"),
    ("--seed 99999999999999999999", ["x"], "seed must fit"),
    ("--top-p 0", ["x"], "top_p must be above 0"),
    ("--max-tokens 0", ["x"], "max_tokens must be at least 1"),
    ("--stop {empty}", ["x"], "stop must not contain an empty string"),
    ("--device meta", ["x"], "--device meta: PyTorch finds no such device"),
]


@pytest.fixture
def folder(tmp_path):
    """A folder with all files."""
    (tmp_path / "gguf").mkdir()
    for name, content in FILES.items():
        (tmp_path / name).write_bytes(content)
    return tmp_path


@pytest.mark.parametrize(("options", "prompts", "message"), BAD_INPUT, ids=range(len(BAD_INPUT)))
def test_bad_input_gives_a_one_line_error_and_exit_code_2(run, model_folder, folder, options, prompts, message):
    given = [each.replace("/", f"{folder}/", 1).format(full="/dev/full", empty="") for each in options.split()]
    code, out, err = run("generate", "--model", model_folder, *given, *prompts)
    assert (code, out) == (2, "")
    [line] = [line for line in err.splitlines() if line.startswith("error: ")]
    assert message in line
    assert "Traceback" not in err


@pytest.mark.parametrize("is_terminal", [False, True])
def test_a_missing_prompt_is_an_error(run, model_folder, is_terminal):
    stdin = io.StringIO()
    stdin.isatty = lambda: is_terminal
    code, _, err = run("generate", "--model", model_folder, stdin=stdin)
    assert code == 2
    assert "no prompt; give one as an argument, with --file, or on stdin" in err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--device nonsense", "--device nonsense"),
        ("--attention flashinfer", "--attention flashinfer needs a CUDA device"),
        ("--threads 100000", "--threads 100000: give at most"),
        ("--drafter rest", "it needs a corpus; give --drafter-option path=SNAPSHOT"),
        ("--drafter rest --drafter-option path=absent.txt", "absent.txt: cannot be read"),
        ("--drafter ssd+lookahead --drafter-option window=1", "--drafter lookahead: window must be 2 to 64"),
        ("--drafter ssd-remote --address unix:/absent/socket", "no drafter answers at unix:/absent/socket"),
        ("--drafter ssd+ssd-remote --address 127.0.0.1:1", "at 127.0.0.1:1 (Connection refused)"),
    ],
)
def test_errors_that_do_not_depend_on_the_model_are_raised_before_loading_it(
    run, model_folder, monkeypatch, options, message
):
    monkeypatch.setattr(launch, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    code, _, err = run("generate", "--model", model_folder, "--device", "cpu", *options.split(), "x")
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("3", "--tensor-parallel 3 does not divide the model's num_heads, 4"),
        ("2 --drafter self-int8", "--drafter self-int8 reads the keys and values of the whole target"),
    ],
)
def test_models_that_cannot_be_divided_are_refused_before_their_weights_are_read(
    generate, model_folder, tmp_path, options, reason
):
    for name in ("config.json", "tokenizer.json"):
        (tmp_path / name).write_bytes((model_folder / name).read_bytes())
    err = generate("--tensor-parallel", *options.split(), "x", model=tmp_path, status=2).err
    assert reason in err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("ranks", "reason"), [(1, "--lora a: there is no folder absent"), (2, "--lora cannot be combined with --tensor-p")]
)
def test_adapters_that_cannot_be_used_are_refused_before_loading_the_model(model_folder, monkeypatch, ranks, reason):
    monkeypatch.setattr(launch, "load_model", lambda *_, **__: pytest.fail("it was loaded"))
    with pytest.raises(UserError, match=reason):
        launch.load(
            EngineOptions(folder=model_folder, device="cpu", loras={"a": Path("absent")}, tensor_parallel=ranks)
        )


def test_quantized_weights_run_with_a_warning_or_are_refused(generate, tmp_path):
    make_folder(tmp_path)
    quantize_folder(tmp_path, FORMATS["vLLM's fp8"])
    arguments = ("--max-tokens", 3, "--drafter", "none", "x")
    assert "warning: config.json requires activations in fp8, which" in generate(*arguments, model=tmp_path).err
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    err = generate(*arguments, model=tmp_path, status=2).err
    assert err.startswith("error: config.json describes quantized weights ('gptq'), which this engine does not read;")
