"""Sticky pointers: the place that a sequence seems to be copied from, kept through mismatches.

A pointer of a source stands where a long match went on. It advances with every token, right or wrong, so that a copy
with a word changed is found again at once, before any match is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.candidates import DROPPED_MISSES
from ssd.kernels.jit import inline, outline, peek
from ssd.kernels.odds import GLOBAL, SOURCES
from ssd.sequences.tables import NO_POINTER, POINTERS, TEXT

POINTER_FROM = 6
"""A pointer is set by matches of at least this many tokens."""
FORGIVEN_AFTER = 16
"""Tokens got right in a row after which a pointer's misses are forgotten."""

# Columns of a pointer.
PLACE, RUN, MISSED = range(3)


class RingView(NamedTuple):
    """The ring as a view shows it."""

    text: int
    """Address of slot 0."""
    oldest: int
    head: int
    """The positions that may be read: from `oldest`, up to and without `head`."""
    slots: int


@inline
def address_of(pointer, source, text, ring):  # type: ignore[no-untyped-def]
    """Where a pointer's next token lies; 0 if it was overwritten, or there is no pointer."""
    if pointer == NO_POINTER:
        return np.int64(0)
    if source == GLOBAL:
        return ring.text + 4 * (pointer % ring.slots) if ring.oldest <= pointer < ring.head else np.int64(0)
    return text + 4 * pointer


@outline
def advance_pointers(sequence, token, ring):  # type: ignore[no-untyped-def]
    """Compare what the pointers of a row of state said with the token that came, and move them on."""
    for source in range(SOURCES):
        pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
        address = address_of(pointer[PLACE], source, sequence[TEXT], ring)
        if address == 0:
            pointer[PLACE] = NO_POINTER
            continue
        said = peek(address, 0)
        if said == token:
            pointer[RUN] += 1
            pointer[MISSED] = 0 if pointer[RUN] >= FORGIVEN_AFTER else pointer[MISSED]
        else:
            pointer[RUN] = 0
            pointer[MISSED] += 1
        pointer[PLACE] += 1
        if said == SEPARATOR or pointer[MISSED] > DROPPED_MISSES:
            pointer[PLACE] = NO_POINTER


@inline
def move_pointer(sequence, source, length, position):  # type: ignore[no-untyped-def]
    """Point to where a match of `length` tokens goes on, if that is longer than what the pointer got right."""
    pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
    if length >= POINTER_FROM and (pointer[PLACE] == NO_POINTER or length > pointer[RUN]):
        pointer[PLACE], pointer[RUN], pointer[MISSED] = position, length, 0
