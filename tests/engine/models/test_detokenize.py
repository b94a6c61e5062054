"""Text that is returned token by token equals the text of all tokens, and is returned as early as possible."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HubTokenizer
from tokenizers import decoders, models, pre_tokenizers

from engine.models.tokenizer import LONG_TEXT, MAX_HELD, UNFINISHED, Detokenizer, Tokenizer
from tests.strategies import array

BYTE_CHARS = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_level():
    """Return a vocabulary of all bytes and some pairs of bytes."""
    pairs = [left + right for left in "äåæĠ" for right in "\xb8½aĢ"]
    vocabulary = {piece: index for index, piece in enumerate([*BYTE_CHARS, *pairs])}
    hub = HubTokenizer(models.BPE(vocabulary, []))
    hub.decoder = decoders.ByteLevel()
    return hub


def with_byte_fallback():
    """Return a vocabulary of words with their space, and bytes for other text, as in Llama 2."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "\u2581", "cat", "\u2581cat"]
    hub = HubTokenizer(models.BPE({piece: index for index, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    hub.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return hub


BYTES, FALLBACK = byte_level(), with_byte_fallback()


def decode_with(hub):
    return lambda tokens: str(hub.decode(tokens.tolist(), skip_special_tokens=True))


def fed(hub, prompt, tokens):
    detokenizer = Detokenizer(decode_with(hub), array(prompt))
    return [*(detokenizer.feed(token) for token in tokens), detokenizer.finish()]


@given(
    st.lists(st.integers(0, len(BYTE_CHARS) + 11), max_size=30), st.integers(0, 60), st.sampled_from(["", "é", "🐈"])
)
def test_pieces_add_up_to_the_text_of_any_bytes(tokens, invalid, last):
    tokens += [*byte_tokens(b"\x80" * invalid), *byte_tokens(last.encode())]
    pieces = fed(BYTES, [BYTES.token_to_id("a")], tokens)
    assert "".join(pieces) == decode_with(BYTES)(array(tokens))


words = st.sampled_from(["\u2581the", "\u2581", "cat", "\u2581cat", "ä", "猫", "🐈", "\u2581é"])


def fallback_ids(word):
    known = FALLBACK.token_to_id(word)
    if known is not None:
        return [known]
    return [
        FALLBACK.token_to_id("\u2581" if byte == "\u2581" else f"<0x{byte:02X}>")
        for char in word
        for byte in (["\u2581"] if char == "\u2581" else char.encode())
    ]


@given(st.lists(words, min_size=1, max_size=12), st.lists(words, max_size=12))
def test_spaces_and_split_characters_are_complete(prompt, output):
    ids = [[token for word in text for token in fallback_ids(word)] for text in (prompt, output)]
    pieces = fed(FALLBACK, *ids)
    assert "".join(pieces) == "".join(output).replace("\u2581", " ")
    assert all("\N{REPLACEMENT CHARACTER}" not in piece for piece in pieces)


def byte_chars():
    """Return the character of each byte in GPT-2's alphabet."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(rest)) for byte in range(256)]


def byte_tokens(text):
    """Return a token for each byte."""
    return [BYTES.token_to_id(byte_chars()[byte]) for byte in text]


def test_text_is_held_back_no_longer_than_needed():
    """Incomplete bytes are returned at the end."""
    assert fed(BYTES, byte_tokens(b"a"), byte_tokens("ä猫b".encode())) == ["", "ä", "", "", "猫", "b", ""]
    assert fed(BYTES, [], byte_tokens(b"x\xe4")) == ["x", "", "\N{REPLACEMENT CHARACTER}"]


def saved(hub, folder):
    hub.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


def tokenizers_of_each_kind():
    """Return a tokenizer of each kind of decoder, with special tokens."""
    metaspace = HubTokenizer(models.WordLevel({"<unk>": 0, "\u2581the": 1, "cat": 2, "\u2581é": 3}, unk_token="<unk>"))
    metaspace.decoder = decoders.Metaspace()
    words = HubTokenizer(models.WordPiece({"[UNK]": 0, "the": 1, "##cat": 2, "é": 3}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece(cleanup=False)
    kinds = {"bytes": byte_level(), "fallback": with_byte_fallback(), "metaspace": metaspace, "words": words}
    for hub in kinds.values():
        hub.add_special_tokens(["<|end|>", "<｜é▁x｜>"])
        hub.add_tokens(["<plain é>"])
    return kinds


@pytest.mark.parametrize("kind", ["bytes", "fallback", "metaspace", "words"])
def test_the_bytes_of_tokens_add_up_to_the_text(kind, tmp_path):
    hub = tokenizers_of_each_kind()[kind]
    tokenizer = saved(hub, tmp_path)
    rng = np.random.default_rng(0)
    first = next(token for token in range(hub.get_vocab_size()) if tokenizer.decode(array([token])).isalpha())
    for _ in range(200):
        tokens = rng.integers(1, hub.get_vocab_size(), 8)
        text = tokenizer.decode(array([first, *tokens]), skip_special_tokens=False)
        added = b"".join(map(tokenizer.token_bytes, tokens.tolist()))
        assert tokenizer.decode(array([first])) + added.decode(errors="replace") == text or "\ufffd" in text
    special = hub.token_to_id("<｜é▁x｜>")
    assert tokenizer.special_ids == {special, hub.token_to_id("<|end|>")}
    assert tokenizer.token_bytes(special).decode().strip().replace(" ", "▁") == "<｜é▁x｜>"
    assert tokenizer.token_bytes(9999) == b""


@pytest.mark.parametrize("text", ["🦄🦄🎉é", "猫 x\n"])
def test_tokens_that_are_parts_of_characters_have_their_own_bytes(text, tmp_path):
    fallback = [FALLBACK.token_to_id(f"<0x{byte:02X}>") for byte in text.encode()]
    for hub, tokens in ((BYTES, byte_tokens(text.encode())), (FALLBACK, fallback)):
        assert b"".join(map(saved(hub, tmp_path).token_bytes, tokens)) == text.encode()


@pytest.mark.parametrize(("prompt", "character"), [([], None), ([1] * 50, None), ([], ""), ([], UNFINISHED)])
def test_the_window_does_not_grow(prompt, character):
    sizes = []

    def decode(tokens):
        sizes.append(len(tokens))
        return "".join(chr(97 + token % 26) if character is None else character for token in tokens.tolist())

    detokenizer = Detokenizer(decode, array(prompt))
    tokens = np.arange(500)
    pieces = [detokenizer.feed(token) for token in tokens.tolist()]
    assert "".join([*pieces, detokenizer.finish()]) == decode(tokens)
    assert max(sizes[1:-1]) <= 2 * MAX_HELD + 10


def test_a_completion_keeps_its_leading_space(tmp_path):
    tokenizer, [word] = saved(FALLBACK, tmp_path), fallback_ids("\u2581cat")
    assert tokenizer.decode(array([word])) == "cat"
    assert tokenizer.decode_behind(array(fallback_ids("\u2581the")), array([word])) == " cat"


def test_long_texts_have_the_same_tokens(tmp_path):
    tokenizer, text = saved(BYTES, tmp_path), "é猫 x\n" * (LONG_TEXT // 5)
    assert len(text) >= LONG_TEXT
    parts = tokenizer.encode(text[: LONG_TEXT // 2]), tokenizer.encode(text[LONG_TEXT // 2 :])
    assert np.array_equal(tokenizer.encode(text), np.concatenate(parts))
