"""Hashes of full pages: pages with the same hash hold the same keys and values.

A page's hash covers its tokens and the hash of the previous page, hence all tokens that its keys and values depend on.
The chain begins with a salt and the name of the adapter, so that tenants with different salts never share a page, nor
do requests whose keys and values come from different adapters. The hash is cryptographic: a collision would expose the
text of one request to another.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

HASH_BYTES = 32


def salt_hash(salt: str, adapter: str | None = None) -> bytes:
    """Return the hash that a sequence's chain begins with."""
    # `person` separates the hash of a salt from the hash of a page that holds the same bytes.
    first = blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, person=b"salt").digest()
    if adapter is None:
        return first
    return blake2b(adapter.encode("utf-8", "surrogatepass"), digest_size=HASH_BYTES, key=first, person=b"lora").digest()


def page_hash(previous: bytes, tokens: np.ndarray) -> bytes:
    """Return the hash of a page that holds `tokens`, uint32 [page size], after the page with the hash `previous`."""
    return blake2b(tokens.tobytes(), digest_size=HASH_BYTES, key=previous).digest()


class PageHashes:
    """The hashes of one sequence's full pages, computed on demand and in order."""

    def __init__(self, salt: str, adapter: str | None = None) -> None:
        self._hashes = [salt_hash(salt, adapter)]

    def of(self, tokens: np.ndarray, index: int, page_size: int) -> bytes:
        """Return the hash of page `index` of a sequence whose committed `tokens`, uint32 [N], fill that page."""
        hashes = self._hashes
        while len(hashes) <= index + 1:
            start = (len(hashes) - 1) * page_size
            hashes.append(page_hash(hashes[-1], tokens[start : start + page_size]))
        return hashes[index + 1]
