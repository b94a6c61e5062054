import json

import pytest
from transformers import GenerationConfig

from engine.models.generation import GenerationDefaults, load_generation_defaults
from ssd.errors import UserError


def test_a_folder_without_the_file_recommends_nothing(tmp_path):
    assert load_generation_defaults(tmp_path) == GenerationDefaults()


def test_files_of_transformers_are_read(tmp_path):
    """The recommendations of Qwen2.5-Instruct."""
    GenerationConfig(
        do_sample=True,
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        min_p=0.1,
        repetition_penalty=1.05,
        bos_token_id=1,
        eos_token_id=[5, 3],
    ).save_pretrained(tmp_path)
    assert load_generation_defaults(tmp_path) == GenerationDefaults(
        {"temperature": 0.7, "top_k": 20, "top_p": 0.8, "min_p": 0.1, "repetition_penalty": 1.05}, (5, 3)
    )


@pytest.mark.parametrize(
    ("fields", "temperature"),
    [
        ({"temperature": 0.6}, 0.6),
        ({"do_sample": True}, None),
        ({"do_sample": False}, 0.0),
        ({"do_sample": False, "temperature": 0.6}, 0.0),
        ({"do_sample": None, "temperature": None}, None),
    ],
)
def test_greedy_decoding_needs_an_explicit_setting(tmp_path, fields, temperature):
    (tmp_path / "generation_config.json").write_text(json.dumps(fields))
    assert load_generation_defaults(tmp_path).sampling.get("temperature") == temperature


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", "hot"),
        ("top_k", -2),
        ("top_k", float("inf")),
        ("top_p", 0),
        ("top_p", 1.1),
        ("min_p", 2),
        ("repetition_penalty", 0),
        ("repetition_penalty", 1e-38),
        ("eos_token_id", "</s>"),
        ("eos_token_id", {}),
    ],
)
def test_invalid_values_are_refused(tmp_path, field, value):
    (tmp_path / "generation_config.json").write_text(json.dumps({field: value}))
    with pytest.raises(UserError, match=r"generation_config\.json has an invalid field") as refusal:
        load_generation_defaults(tmp_path)
    assert "\n" not in str(refusal.value)
