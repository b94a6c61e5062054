"""Models from GGUF files: the same weights, tokens and prompts as from the folders that they were written from."""

import shutil
from itertools import pairwise

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, RopeScalingType, TokenType, dequantize
from transformers import AutoModelForCausalLM

from benchmarks.support.gguf_model import in_rotary_order, write_gguf
from drafter_service.client.chat_template import load_chat_template
from drafter_service.client.gguf import SPLITTINGS
from drafter_service.client.identity import model_identity, vocabulary_fingerprint
from drafter_service.client.tokenizer import TextTokenizer, load_tokenizer
from drafter_service.plugins.settings import identity_of
from engine.commands.prompts import read_texts
from engine.models.gguf_model import GgufTensors
from engine.models.loader import check_draft_model, load_config, load_model
from engine.models.rope import Llama3, Rope
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from ssd.errors import UserError
from tests.engine.conftest import make_folder
from tests.engine.forward import prompt_logits
from tests.engine.models.test_families import TOKENS, YARN, transformers_logits

LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def add_rope_factors(writer, theta=500_000.0, head_dim=16, scaling=None):
    plain = Rope(theta).frequencies(head_dim)
    writer.add_tensor("rope_freqs.weight", (plain / (scaling or Llama3(**LLAMA3)).scale(plain, theta)).numpy())


def add_yarn(writer):
    writer.add_rope_scaling_type(RopeScalingType.YARN)
    writer.add_rope_scaling_factor(4.0)
    writer.add_rope_scaling_orig_ctx_len(128)


FAMILIES = {
    "llama 2": ({"num_key_value_heads": 4, "tie_word_embeddings": False}, None),
    "llama 3.1": ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 500_000.0, **LLAMA3}}, add_rope_factors),
    "llama with biases": ({"attention_bias": True, "mlp_bias": True, "head_dim": 32}, None),
    "qwen 2.5": ({"family": "qwen2"}, None),
    "qwen 2.5, yarn": ({"family": "qwen2", "rope_parameters": YARN}, add_yarn),
    "qwen 3": ({"family": "qwen3", "head_dim": 32, "tie_word_embeddings": False}, None),
}


def written(folder, file, **options):
    """Write a folder as GGUF; return the file."""
    write_gguf(folder, file, **{"pre": "gpt-2", **{name: value for name, value in options.items() if value}})
    return file


@pytest.mark.parametrize(("shape", "extend"), FAMILIES.values(), ids=FAMILIES.keys())
def test_a_file_is_the_model_of_its_folder(tmp_path, shape, extend):
    make_folder(tmp_path / "model", vary=0.3, **shape)
    file = written(tmp_path / "model", tmp_path / "model.gguf", extend=extend)
    expected, found = load_model(tmp_path / "model"), load_model(file)
    assert found.config.rope == expected.config.rope
    for (name, left), (_, right) in zip(expected.named_parameters(), found.named_parameters(), strict=True):
        assert torch.equal(left, right), name
    assert torch.equal(prompt_logits(found, TOKENS.numpy()), prompt_logits(expected, TOKENS.numpy()))


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_quantized_weights_are_those_that_transformers_reads(tmp_path, kind):
    make_folder(tmp_path / "model", vary=0.3)
    file = written(tmp_path / "model", tmp_path / "model.gguf", kind=GGMLQuantizationType[kind])
    reference = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file=file.name, dtype=torch.float32)
    found = prompt_logits(load_model(file), TOKENS.numpy())
    assert (found - transformers_logits(reference)).abs().max() < 1e-4
    close = {"F16": 0.01, "BF16": 0.1, "Q8_0": 0.2}
    if kind in close:
        original = prompt_logits(load_model(tmp_path / "model"), TOKENS.numpy())
        assert (found - original).abs().max() < close[kind] * original.abs().max()


@pytest.mark.parametrize(("kind", "size"), [("Q4_K", 144), ("Q6_K", 210)])
def test_super_blocks_are_dequantized_and_reordered(tmp_path, kind, size):
    """The library has no function that quantizes to them, so the bytes are random; their scales are small."""
    rows = np.random.default_rng(0).integers(0, 60, (64, size), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_head_count(4)
    writer.add_tensor("blk.0.attn_q.weight", rows, raw_dtype=GGMLQuantizationType[kind])
    close(writer)
    found = GgufTensors(tmp_path / "model.gguf").read("model.layers.0.self_attn.q_proj.weight").numpy()
    stored = dequantize(rows, GGMLQuantizationType[kind])
    assert np.array_equal(in_rotary_order("q_proj", found, 16), stored)


def close(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_part_of_a_weight_is_that_part_of_the_whole(tmp_path, model_folder):
    """Ranks of a divided model read parts."""
    tensors = GgufTensors(written(model_folder, tmp_path / "model.gguf", kind=GGMLQuantizationType.Q8_0))
    name = "model.layers.1.self_attn.q_proj.weight"
    index = (slice(8, 40), slice(3, 50))
    assert torch.equal(tensors.read(name, index), tensors.read(name)[index])


def test_tokens_are_those_of_the_folder(tmp_path, model_folder):
    file = written(model_folder, tmp_path / "model.gguf")
    ours, folders, of_warm = Tokenizer(file), Tokenizer(model_folder), TextTokenizer(file)
    for text in [*read_texts(SHIPPED_MODEL / "prompts.jsonl"), "naïve 🦄  \t x<|endoftext|>y"]:
        ids = ours.encode(text)
        assert np.array_equal(ids, folders.encode(text))
        assert ours.decode(ids) == folders.decode(ids)
        assert np.array_equal(of_warm.encode([text])[0], ids)
    assert ours.tokens() == folders.tokens()


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("gpt-2", "I'll get 1234. DON'T\n\n a", "I 'll Ġget Ġ1234 . ĠDON ' T ĊĊ Ġa"),
        ("smollm", "I'll get 1234. DON'T\n\n a", "I 'll Ġget Ġ 1 2 3 4 . ĠDON ' T ĊĊ Ġa"),
        ("llama-bpe", "I'll get 1234. DON'T\n\n a", "I 'll Ġget Ġ 123 4 . ĠDON 'T ĊĊ Ġa"),
        ("qwen2", "I'll get 1234. DON'T\n\n a", "I 'll Ġget Ġ 1 2 3 4 . ĠDON 'T ĊĊ Ġa"),
        ("tekken", "getHTTPName 12 a//\n", "get HTTPName Ġ 1 2 Ġa //Ċ"),
    ],
)
def test_words_are_split_as_the_name_of_the_pre_tokenizer_says(tmp_path, model_folder, name, text, words):
    assert name in SPLITTINGS
    tokenizer = load_tokenizer(written(model_folder, tmp_path / "model.gguf", pre=name))
    assert [word for word, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == words.split()


def test_defaults_of_a_pre_tokenizer_hold_unless_the_file_says_otherwise(tmp_path, model_folder):
    def tokens(name, is_begun):
        def extend(writer):
            writer.add_bos_token_id(5)
            writer.kv_data[0].pop("tokenizer.ggml.add_bos_token")
            if is_begun is not None:
                writer.add_add_bos_token(is_begun)

        file = written(model_folder, tmp_path / f"{name}-{is_begun}.gguf", pre=name, extend=extend)
        return Tokenizer(file).encode("e\N{COMBINING ACUTE ACCENT}").tolist()

    plain = tokens("gpt-2", None)
    assert tokens("gpt-2", True) == tokens("llama-bpe", None) == [5, *plain]
    assert tokens("llama-bpe", False) == plain
    assert tokens("qwen2", None) == Tokenizer(model_folder).encode("é").tolist() != plain


PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *"▁abcd", "▁a", "ab", "bc", "▁ab", "abc"]


def naive_pieces(text):
    """Merge the two neighbors that make the piece with the best score, the first of several, until there are none."""
    pieces = list(text)
    while True:
        merged = [(PIECES.index(a + b), at) for at, (a, b) in enumerate(pairwise(pieces)) if a + b in PIECES]
        if not merged:
            return pieces
        _, at = min(merged)
        pieces[at : at + 2] = ["".join(pieces[at : at + 2])]


def add_pieces(writer):
    for key in [key for key in writer.kv_data[0] if key.startswith("tokenizer.")]:
        del writer.kv_data[0][key]
    writer.add_tokenizer_model("llama")
    writer.add_token_list(PIECES)
    writer.add_token_scores([-float(at) for at in range(len(PIECES))])
    types = [TokenType.UNKNOWN, TokenType.CONTROL, TokenType.CONTROL, *[TokenType.BYTE] * 256]
    writer.add_token_types([*types, *[TokenType.NORMAL] * (len(PIECES) - len(types))])
    writer.add_unk_token_id(0)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)


def test_scored_pieces_are_merged_from_the_best(tmp_path, model_folder):
    tokenizer = Tokenizer(written(model_folder, tmp_path / "model.gguf", extend=add_pieces))
    for text in ("abc", "ab cab", "bcabab", "a  dbc"):
        ids = tokenizer.encode(text)
        assert [PIECES[token] for token in ids] == ["<s>", *naive_pieces("▁" + text.replace(" ", "▁"))]
        assert tokenizer.decode(ids) == text
    assert [PIECES[token] for token in tokenizer.encode("é</s>")] == ["<s>", "▁", "<0xC3>", "<0xA9>", "</s>"]
    assert tokenizer.decode(tokenizer.encode("aé")) == "aé"


def test_ends_templates_and_identity_come_from_the_metadata(tmp_path, model_folder):
    def extend(writer):
        writer.add_eot_token_id(7)
        writer.add_chat_template([{"name": "default", "template": "{{ eos_token }}{{ messages[0].content }}"}])

    file = written(model_folder, tmp_path / "tiny.Q8.gguf", extend=extend)
    assert load_config(file).eos_token_ids == (0, 7)
    assert load_chat_template(file).render([{"role": "user", "content": "hi"}]) == "<|endoftext|>hi"
    identity, tokens = model_identity(file), Tokenizer(model_folder).tokens()
    assert (identity.name, identity.vocab_size) == ("tiny.Q8", len(tokens))
    assert identity.tokenizer == vocabulary_fingerprint(tokens[token].encode() for token in sorted(tokens))
    assert identity_of(str(file), 0, pytest.fail) == identity
    without_suffix = tmp_path / "sha256-0f3a"
    shutil.copy(file, without_suffix)
    assert load_config(without_suffix) == load_config(file)


def test_a_file_drafts_for_a_folder_with_its_tokens(tmp_path, model_folder):
    make_folder(tmp_path / "small", hidden_size=32)
    check_draft_model(written(tmp_path / "small", tmp_path / "small.gguf"), model_folder)
    tokens = sorted(Tokenizer(model_folder).tokens().items())
    other = written(
        tmp_path / "small", tmp_path / "other.gguf", tokens=[text for _, text in tokens[:50:-1] + tokens[:51]]
    )
    with pytest.raises(UserError, match="has another tokenizer than the target: token 0 is "):
        check_draft_model(other, model_folder)


def setting(key, value):
    def extend(writer):
        writer.kv_data[0].pop(key, None)
        if isinstance(value, str):
            writer.add_string(key, value)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif value is not None:
            writer.add_uint32(key, value)

    return extend


def other_factors(writer):
    add_rope_factors(writer, scaling=Llama3(8.0, 1.0, 2.0, 8192))


def sinks(writer):
    writer.add_tensor("blk.0.attn_sinks.weight", np.zeros(4, np.float32))


REFUSALS = [
    (setting("general.architecture", "gemma3"), "'gemma3', which .* llama, qwen2, qwen3"),
    (setting("llama.expert_count", 8), "has experts"),
    (setting("llama.feed_forward_length", [96, 96]), "feed_forward_length for each layer"),
    (setting("llama.block_count", None), "has no llama.block_count"),
    (setting("llama.block_count", 3), "lacks model.layers.2"),
    (setting("llama.block_count", 1), "which the metadata does not describe"),
    (setting("llama.attention.value_length", 8), "not as wide as keys"),
    (setting("llama.rope.scaling.type", "longrope"), "model.gguf requires rope scaling 'longrope'"),
    (other_factors, "scales rotary frequencies in a way"),
    (setting("split.count", 3), "one of 3 parts; join them"),
    (sinks, "has the tensor blk.0.attn_sinks.weight, which the metadata does not describe"),
    (setting("tokenizer.ggml.pre", "bloom"), "pre-tokenizer 'bloom'"),
    (setting("tokenizer.ggml.pre", None), "has no tokenizer.ggml.pre"),
    (setting("tokenizer.ggml.model", "t5"), "tokenizer of the kind 't5'"),
    (setting("tokenizer.ggml.merges", ["q qq"]), "the tokenizer in .* cannot be read"),
]


@pytest.mark.parametrize(("extend", "message"), REFUSALS)
def test_what_does_not_fit_is_refused_with_its_reason(tmp_path, model_folder, extend, message):
    file = written(model_folder, tmp_path / "model.gguf", extend=extend)
    with pytest.raises(UserError, match=message):
        Tokenizer(file), load_model(file)


@pytest.mark.parametrize("size", [20, 2000, -4000])
def test_a_file_that_is_cut_short_is_refused(tmp_path, model_folder, size):
    file = written(model_folder, tmp_path / "model.gguf")
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(UserError, match=r"model\.gguf is damaged or cut short.* its [\d,]+ bytes .* copy it again$"):
        load_model(file)


def test_without_the_library_the_extra_is_named(tmp_path, model_folder, monkeypatch):
    file = written(model_folder, tmp_path / "model.gguf")
    monkeypatch.setitem(__import__("sys").modules, "gguf", None)
    with pytest.raises(UserError, match=r"needs the library gguf; .*\[gguf\]"):
        load_config(file)
