"""Names of full pages: what has the same name has the same keys and values.

A page's name is a hash over its tokens and the name of the page before it, and so over everything that its keys and
values depend on. It begins with a salt, so that tenants with different salts never share a page. The hash is a
cryptographic one: a collision would show one request the text of another.
"""

from __future__ import annotations

from hashlib import blake2b

import numpy as np

NAME_BYTES = 32


def first_name(salt: str) -> bytes:
    """What stands before a sequence's first page."""
    # `person` keeps a salt from posing as the tokens of a page.
    return blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=NAME_BYTES, person=b"salt").digest()


def page_name(before: bytes, tokens: np.ndarray) -> bytes:
    """The name of a page that holds `tokens`, uint32 [page size], behind the page called `before`."""
    return blake2b(tokens.tobytes(), digest_size=NAME_BYTES, key=before).digest()


class PageNames:
    """The names of one sequence's full pages, made as they are asked for, in order."""

    def __init__(self, salt: str) -> None:
        self._names = [first_name(salt)]

    def name(self, tokens: np.ndarray, index: int, page_size: int) -> bytes:
        """The name of page `index` of a sequence that has committed `tokens`, uint32 [N], which must fill it."""
        names = self._names
        while len(names) <= index + 1:
            start = (len(names) - 1) * page_size
            names.append(page_name(names[-1], tokens[start : start + page_size]))
        return names[index + 1]
