"""Input that the `generate` command refuses."""

import pytest

from tests.engine.commands.generate.outputs import PROMPT
from tests.engine.conftest import make_folder
from tests.engine.damage import edit_json
from tests.engine.models.quantized_formats import FORMATS, quantize_folder

BAD_INPUT = {
    "empty prompt": ((), [""], "prompt 1: the prompt is empty"),
    "second prompt empty": ((), ["x", ""], "prompt 2: the prompt is empty"),
    "prompt too long": ((), ["x " * 2000], "context window of 512"),
    "drafter option without a value": (("--drafter-option", "x"), ["x"], "--drafter-option must be KEY=VALUE, not 'x'"),
    "drafter option given twice": (("--drafter-option", "x=1", "--drafter-option", "x=2"), ["x"], "x was given before"),
    "unknown drafter option": (("--drafter-option", "x=1"), ["x"], "the drafter ssd has no option x; give "),
    "no such file": (("--file", "{tmp}/missing.txt"), [], "cannot read"),
    "empty file": (("--file", "{tmp}/empty.txt"), [], "has no prompt"),
    "no such folder": (
        ("--model", "/no/such"),
        [PROMPT],
        "no model folder /no/such; give a Hugging Face folder, a GGUF file, or",
    ),
    "file that is not text": (("--file", "{tmp}/binary.txt"), [], "is not text in UTF-8"),
    "line that is not JSON": (("--file", "{tmp}/bad.jsonl"), [], "line 1 is not a JSON object"),
    "prompt of another type": (("--file", "{tmp}/type.jsonl"), [], "line 1: `prompt` must be"),
    "unknown field of a line": (
        ("--file", "{tmp}/field.jsonl"),
        [],
        "field.jsonl, line 2: there is no field `max_tokens`; give prompt, adapter, source",
    ),
    "adapter of another type": (("--file", "{tmp}/number.jsonl"), [], "line 2: `adapter` must be text"),
    "token outside the vocabulary": (("--file", "{tmp}/ids.jsonl"), [], "vocabulary ends at 299"),
    "prompts twice": (("--file", "{tmp}/empty.txt"), ["x"], "not both"),
    "no address": (("--drafter", "ssd-remote", "--address", "nonsense"), ["x"], "is not an address"),
    "folder without a model": (("--model", "{tmp}"), ["x"], "is not a model folder: it has no config.json; give a"),
    "folder of a GGUF file": (("--model", "{tmp}/gguf"), ["x"], "it has no config.json; give the file "),
    "file that is no model": (("--model", "{tmp}/ids.jsonl"), ["x"], "ids.jsonl is not a model folder; give the"),
    "output in no folder": (("--out", "{tmp}/no/such/folder"), ["x"], "cannot write"),
    "output that is a folder": (("--out", "{tmp}"), ["x"], "cannot write"),
    "bytes that are not text": ((), ["\udcff"], "prompt 1: the prompt is not valid Unicode"),
    "text that is not Unicode": (("--file", "{tmp}/surrogate.jsonl"), [], "prompt 1: the prompt is not valid Unicode"),
    "disk full": (("--out", "/dev/full", "--max-tokens", "1"), ["x"], "cannot write /dev/full"),
    "seed out of range": (("--seed", "99999999999999999999"), ["x"], "seed must fit"),
    "top-p out of range": (("--top-p", "0"), ["x"], "top_p must be above 0"),
    "no tokens": (("--max-tokens", "0"), ["x"], "max_tokens must be at least 1"),
    "an empty stop string": (("--stop", ""), ["x"], "stop must not contain an empty string"),
    "a second prompt that is too long": (("--n", "2"), ["x", "x " * 2000], "prompt 2: the prompt has"),
    "an adapter without a folder": (("--lora", "a"), ["x"], "--lora must be NAME=FOLDER, not 'a'"),
    "two adapters of a name": (("--lora", "a=x", "--lora", "a=y"), ["x"], "--lora a=y: a was given before"),
    "an unknown adapter": (("--adapter", "a"), ["x"], "prompt 1: there is no adapter 'a'; this engine has none"),
    "an unknown adapter of a line": (("--file", "{tmp}/adapter.jsonl"), [], "prompt 2: there is no adapter 'a'"),
    "no prompt on stdin": ((), [], "no prompt; give one as an argument, with --file, or on stdin"),
    "a device without data": (("--device", "meta"), ["x"], "--device meta: PyTorch finds no such device"),
}


@pytest.mark.parametrize(("options", "prompts", "message"), BAD_INPUT.values(), ids=BAD_INPUT.keys())
def test_bad_input_gives_a_one_line_error_and_exit_code_2(run, model_folder, tmp_path, options, prompts, message):
    (tmp_path / "empty.txt").touch()
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf" / "model.gguf").write_bytes(b"GGUF")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\xfa")
    (tmp_path / "bad.jsonl").write_text("{\n")
    (tmp_path / "type.jsonl").write_text('{"prompt": [-1]}\n')
    (tmp_path / "ids.jsonl").write_text('{"prompt": [1, 300]}\n')
    (tmp_path / "number.jsonl").write_text('{"prompt": "x", "adapter": "a"}\n{"prompt": "y", "adapter": 1}\n')
    (tmp_path / "field.jsonl").write_text('{"prompt": "a", "source": "a note"}\n{"prompt": "b", "max_tokens": 3}')
    (tmp_path / "adapter.jsonl").write_text('{"prompt": "x"}\n{"prompt": "x", "adapter": "a"}\n')
    (tmp_path / "surrogate.jsonl").write_text('{"prompt": "\\ud800"}\n')
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
        (("--threads", 100_000), "--threads 100000: give at most"),
        (("--drafter", "rest"), "it needs a corpus; give --drafter-option path=SNAPSHOT"),
        (("--drafter", "rest", "--drafter-option", "path=absent.txt"), "absent.txt: cannot be read"),
        (("--drafter", "ssd+lookahead", "--drafter-option", "window=1"), "--drafter lookahead: window must be 2 to 64"),
        (("--lora", "a=absent"), "--lora a: there is no folder absent"),
        (("--drafter", "ssd-remote", "--address", "unix:/absent/socket"), "no drafter answers at unix:/absent/socket"),
        (("--drafter", "ssd+ssd-remote", "--address", "127.0.0.1:1"), "at 127.0.0.1:1 (Connection refused)"),
    ],
)
def test_errors_that_do_not_depend_on_the_model_are_raised_before_loading_it(
    run, model_folder, monkeypatch, options, message
):
    monkeypatch.setattr("engine.commands.launch.load_model", lambda *_, **__: pytest.fail("it was loaded"))
    code, _, err = run("generate", "--model", model_folder, "--device", "cpu", *options, "x")
    assert (code, message in err) == (2, True)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (("3",), "--tensor-parallel 3 does not divide the model's num_heads, 4"),
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
    edit_json(tmp_path / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    code, _, err = run(*arguments)
    assert code == 2
    assert err.startswith("error: config.json describes quantized weights ('gptq'), which this engine does not read;")
    assert err.count("\n") == 1
