"""Hashes of full pages: pages with the same hash hold the same keys and values.

A page's hash covers its tokens and the hash of the previous page, hence all tokens that its keys and values depend on.
The chain begins with a salt and the name of the adapter, so that tenants with different salts never share a page, nor
do requests whose keys and values come from different adapters. A collision would expose the text of one request to
another. The hash is SipHash-2-4 with 128 bits (Aumasson and Bernstein 2012) under a random key of this process, without
which nobody can construct a collision.
"""

from __future__ import annotations

import secrets
from hashlib import blake2b

import numpy as np

from ssd.kernels.jit import Int, Nothing, Tokens, UlongRows, Ulongs, inline, kernel

KEY = np.frombuffer(secrets.token_bytes(16), np.uint64).copy()
"""uint64 [2]: the key of all hashes, new in each process."""
WORDS = 2
"""Number of uint64 of a hash."""


def salt_hash(salt: str, adapter: str | None = None) -> np.ndarray:
    """Return what a sequence's chain begins with, uint64 [WORDS]."""
    # `person` separates the hash of a salt from others that begin with the same bytes.
    first = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=64, person=b"salt").digest()
    name = b"" if adapter is None else adapter.encode("utf-8", "surrogatepass")
    person = b"base" if adapter is None else b"lora"
    return np.frombuffer(blake2b(name, digest_size=8 * WORDS, key=first, person=person).digest(), np.uint64)


class PageHashes:
    """The hashes of one sequence's full pages, computed in order and kept."""

    def __init__(self, salt: str, adapter: str | None = None) -> None:
        self._chain = np.empty((8, WORDS), np.uint64)
        self._chain[0] = salt_hash(salt, adapter)
        self._known = 0

    def of(self, tokens: np.ndarray, pages: int, page_size: int) -> np.ndarray:
        """Return the hashes of the first `pages` pages of a sequence, uint64 [pages, WORDS].

        tokens: uint32 [N], the committed tokens, which fill these pages.
        """
        if pages > self._known:
            if pages >= len(self._chain):
                grown = np.empty((2 * pages + 1, WORDS), np.uint64)
                grown[: self._known + 1] = self._chain[: self._known + 1]
                self._chain = grown
            hash_pages(KEY, tokens, self._known, pages, page_size, self._chain)
            self._known = pages
        return self._chain[1 : pages + 1]


@inline
def _round(a, b, c, d):
    """Return the state after a SipRound."""
    a += b
    c += d
    b = ((b << np.uint64(13)) | (b >> np.uint64(51))) ^ a
    d = ((d << np.uint64(16)) | (d >> np.uint64(48))) ^ c
    a = (a << np.uint64(32)) | (a >> np.uint64(32))
    c += b
    a += d
    b = ((b << np.uint64(17)) | (b >> np.uint64(47))) ^ c
    d = ((d << np.uint64(21)) | (d >> np.uint64(43))) ^ a
    c = (c << np.uint64(32)) | (c >> np.uint64(32))
    return a, b, c, d


@kernel(Ulongs, Tokens, Int, Int, Int, UlongRows, returns=Nothing)
def hash_pages(key, tokens, known, pages, size, chain):
    """Write `chain[known + 1]` up to `chain[pages]`, the hashes of the previous hash and the tokens of each page.

    key: uint64 [2]. size: number of tokens of a page. chain: uint64 [pages + 1 at least, WORDS].
    """
    length = np.uint64((8 * WORDS + 4 * size) & 255) << np.uint64(56)
    for page in range(known, pages):
        a = key[0] ^ np.uint64(0x736F6D6570736575)
        b = key[1] ^ np.uint64(0x646F72616E646F6D) ^ np.uint64(0xEE)
        c = key[0] ^ np.uint64(0x6C7967656E657261)
        d = key[1] ^ np.uint64(0x7465646279746573)
        for index in range(WORDS + size // 2 + 1):
            if index < WORDS:
                word = chain[page, index]
            else:
                at = page * size + 2 * (index - WORDS)
                left = (page + 1) * size - at
                word = np.uint64(0)
                if left > 0:
                    word = np.uint64(tokens[at])
                if left > 1:
                    word |= np.uint64(tokens[at + 1]) << np.uint64(32)
                else:
                    word |= length
            d ^= word
            for _ in range(2):
                a, b, c, d = _round(a, b, c, d)
            a ^= word
        c ^= np.uint64(0xEE)
        for _ in range(4):
            a, b, c, d = _round(a, b, c, d)
        chain[page + 1, 0] = a ^ b ^ c ^ d
        b ^= np.uint64(0xDD)
        for _ in range(4):
            a, b, c, d = _round(a, b, c, d)
        chain[page + 1, 1] = a ^ b ^ c ^ d
