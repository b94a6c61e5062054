"""Pointers to the text that a sequence seems to be copied from, kept through mismatches.

A source's pointer is set to the token after a long match. It advances with every token, whether its prediction was
right or not, so that a copy with a changed word is found again before a match is.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ssd.corpus.ring import SEPARATOR
from ssd.kernels.candidates import DROPPED_MISSES
from ssd.kernels.jit import inline, outline, peek
from ssd.kernels.probabilities import GLOBAL, SOURCES
from ssd.sequences.tables import NO_POINTER, POINTERS, TEXT

POINTER_FROM = 6
"""Minimum match length that sets a pointer, in tokens."""
CLEAR_MISSES_AFTER = 16
"""Number of consecutive correct predictions after which a pointer's misses are cleared."""

# Columns of a pointer.
PLACE, RUN, MISSED = range(3)


class RingView(NamedTuple):
    """The ring at the time of a view."""

    text: int
    """Address of slot 0."""
    oldest: int
    head: int
    """End of the readable positions, which are `oldest` to `head` - 1."""
    slots: int


@inline
def address_of(pointer, source, text, ring):  # type: ignore[no-untyped-def]
    """Return the address of a pointer's next token; 0 if it was overwritten or there is no pointer."""
    if pointer == NO_POINTER:
        return np.int64(0)
    if source == GLOBAL:
        return ring.text + 4 * (pointer % ring.slots) if ring.oldest <= pointer < ring.head else np.int64(0)
    return text + 4 * pointer


@outline
def advance_pointers(sequence, token, ring):  # type: ignore[no-untyped-def]
    """Compare the predictions of a sequence's pointers with the committed token, and advance them."""
    for source in range(SOURCES):
        pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
        address = address_of(pointer[PLACE], source, sequence[TEXT], ring)
        if address == 0:
            pointer[PLACE] = NO_POINTER
            continue
        predicted = peek(address, 0)
        if predicted == token:
            pointer[RUN] += 1
            pointer[MISSED] = 0 if pointer[RUN] >= CLEAR_MISSES_AFTER else pointer[MISSED]
        else:
            pointer[RUN] = 0
            pointer[MISSED] += 1
        pointer[PLACE] += 1
        if predicted == SEPARATOR or pointer[MISSED] > DROPPED_MISSES:
            pointer[PLACE] = NO_POINTER


@inline
def move_pointer(sequence, source, length, position):  # type: ignore[no-untyped-def]
    """Set a pointer to the token after a match that is longer than the pointer's run of correct predictions."""
    pointer = sequence[POINTERS + 3 * source : POINTERS + 3 * source + 3]
    if length >= POINTER_FROM and (pointer[PLACE] == NO_POINTER or length > pointer[RUN]):
        pointer[PLACE], pointer[RUN], pointer[MISSED] = position, length, 0
