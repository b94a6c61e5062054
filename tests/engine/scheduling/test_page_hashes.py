"""Hashes of pages are equal if and only if the salts, the adapters and the texts up to the page's end are equal."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from engine.scheduling import page_hashes
from engine.scheduling.page_hashes import PageHashes, hash_pages

SIZE = 4
TEXTS = st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE)
SALTS = st.sampled_from(["", "a", "\ud800"])
ADAPTERS = st.sampled_from([None, "", "a"])
MASK = (1 << 64) - 1


def hashes_of(salt, text, adapter=None):
    tokens = np.array(text, np.uint32)
    return [tuple(each) for each in PageHashes(salt, adapter).of(tokens, len(text) // SIZE, SIZE).tolist()]


def siphash(key, message):
    """SipHash-2-4 with 128 bits, as in the paper's reference: the state is v[0] to v[3]."""
    k = [int.from_bytes(key[:8], "little"), int.from_bytes(key[8:], "little")]
    v = [
        0x736F6D6570736575 ^ k[0],
        0x646F72616E646F6D ^ k[1] ^ 0xEE,
        0x6C7967656E657261 ^ k[0],
        0x7465646279746573 ^ k[1],
    ]

    def rotated(word, bits):
        return (word << bits | word >> 64 - bits) & MASK

    def rounds(count):
        for _ in range(count):
            v[0], v[2] = v[0] + v[1] & MASK, v[2] + v[3] & MASK
            v[1], v[3] = rotated(v[1], 13) ^ v[0], rotated(v[3], 16) ^ v[2]
            v[0] = rotated(v[0], 32)
            v[2], v[0] = v[2] + v[1] & MASK, v[0] + v[3] & MASK
            v[1], v[3] = rotated(v[1], 17) ^ v[2], rotated(v[3], 21) ^ v[0]
            v[2] = rotated(v[2], 32)

    padded = message + bytes(-(len(message) + 1) % 8) + bytes([len(message) & 255])
    for start in range(0, len(padded), 8):
        word = int.from_bytes(padded[start : start + 8], "little")
        v[3] ^= word
        rounds(2)
        v[0] ^= word
    v[2] ^= 0xEE
    rounds(4)
    first = v[0] ^ v[1] ^ v[2] ^ v[3]
    v[1] ^= 0xDD
    rounds(4)
    return first.to_bytes(8, "little") + (v[0] ^ v[1] ^ v[2] ^ v[3]).to_bytes(8, "little")


def test_the_naive_siphash_gives_published_values():
    assert siphash(bytes(range(16)), b"").hex() == "a3817f04ba25a8e66df67214c7550293"
    assert siphash(bytes(range(16)), b"\0").hex() == "da87c1d86b99af44347659119b22fc45"


@given(st.binary(min_size=16, max_size=16), st.binary(min_size=16, max_size=16), st.integers(1, 70), st.integers(0, 99))
def test_the_kernel_equals_the_naive_siphash(key, first, size, seed):
    tokens = np.random.default_rng(seed).integers(0, 1 << 32, 3 * size, dtype=np.uint32)
    chain = np.zeros((4, 2), np.uint64)
    chain[0] = np.frombuffer(first, np.uint64)
    hash_pages(np.frombuffer(key, np.uint64).copy(), tokens, 0, 3, size, chain)
    before = first
    for page in range(3):
        before = siphash(key, before + tokens[page * size : (page + 1) * size].tobytes())
        assert chain[page + 1].tobytes() == before


@given(SALTS, ADAPTERS, TEXTS, SALTS, ADAPTERS, TEXTS)
def test_hashes_are_equal_if_and_only_if_salt_adapter_and_prefix_are(
    salt, adapter, text, other_salt, other_adapter, other_text
):
    for index, own in enumerate(hashes_of(salt, text, adapter)):
        for other_index, other in enumerate(hashes_of(other_salt, other_text, other_adapter)):
            end, other_end = (index + 1) * SIZE, (other_index + 1) * SIZE
            is_same = (salt, adapter, text[:end]) == (other_salt, other_adapter, other_text[:other_end])
            assert (own == other) == is_same


def test_hashes_do_not_depend_on_the_order_of_queries():
    tokens = np.arange(200, dtype=np.uint32)
    hashes = PageHashes("")
    first = hashes.of(tokens[:8], 2, SIZE).copy()
    assert hashes.of(tokens, 50, SIZE).tolist() == PageHashes("").of(tokens, 50, SIZE).tolist()
    assert hashes.of(tokens, 2, SIZE).tolist() == first.tolist()


def test_hashes_depend_on_a_key_of_the_process(monkeypatch):
    """Without it, a tenant could search for two prompts with the same hash."""
    tokens = np.arange(8, dtype=np.uint32)
    before = PageHashes("").of(tokens, 2, SIZE).tolist()
    monkeypatch.setattr(page_hashes, "KEY", page_hashes.KEY + 1)
    assert PageHashes("").of(tokens, 2, SIZE).tolist() != before
