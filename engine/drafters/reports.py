"""Kernels that tell a drafter of tokens what running sequences have committed since its last call.

`reported` has a row for each row of the table of requests, and the columns below.
"""

from __future__ import annotations

import numpy as np

from engine.scheduling.table import LENGTH, MAX_DRAFT, SEQUENCE_ID, TEXT
from ssd.kernels.jit import IntPair, LongRows, Longs, Nothing, TokenRows, Tokens, TokensOut, Ulongs, kernel, peek

TOKENS, STEPS, VERIFIED = range(3)
"""Number of leading tokens of a sequence that were reported, or NOT_STARTED; number of steps that have produced tokens
since then; number of draft tokens that the first of those steps verified."""
NOT_STARTED = -1
BYTES = 4
"""Size of a token."""

OFFSETS, OWN_VERIFIED, OWN_ROOM, OWN_STEPS = range(4)
"""Rows of the counts that `report` writes: offsets of each sequence's tokens; its number of verified draft tokens; the
largest number of its draft tokens; number of its steps."""
COUNTS = 4


@kernel(LongRows, LongRows, Longs, Longs, Longs, Ulongs, Longs, TokenRows, returns=IntPair)
def report(state, reported, rows, rooms, at, ids, addresses, counts):
    """Write the arguments of a call for the sequences of B rows that are started and may be drafted, N of them.

    rows, rooms: int64 [B], rows of the table, and largest number of draft tokens of each. Writes their indices to `at`,
    int64 [B], their ids, the addresses of their unreported tokens, and `counts`, uint32 [COUNTS, B + 1], and counts the
    tokens as reported. Returns N, and the largest number of steps.
    """
    count = most = 0
    counts[OFFSETS, 0] = 0
    for index in range(len(rows)):
        row, own = state[rows[index]], reported[rows[index]]
        if own[TOKENS] == NOT_STARTED or row[MAX_DRAFT] == 0:
            continue
        at[count] = index
        ids[count] = row[SEQUENCE_ID]
        addresses[count] = row[TEXT] + BYTES * own[TOKENS]
        counts[OFFSETS, count + 1] = counts[OFFSETS, count] + row[LENGTH] - own[TOKENS]
        counts[OWN_VERIFIED, count] = own[VERIFIED]
        counts[OWN_ROOM, count] = rooms[index]
        counts[OWN_STEPS, count] = own[STEPS]
        most = max(most, own[STEPS])
        own[TOKENS], own[STEPS], own[VERIFIED] = row[LENGTH], 0, 0
        count += 1
    return count, most


@kernel(Longs, Tokens, TokensOut, returns=Nothing)
def copy_tokens(addresses, offsets, tokens):
    """Copy runs of tokens to `tokens`, one after the other. addresses: int64 [B]. offsets: uint32 [B + 1]."""
    for index in range(len(addresses)):
        for place in range(offsets[index], offsets[index + 1]):
            tokens[place] = peek(addresses[index], place - np.int64(offsets[index]))


@kernel(LongRows, Longs, Longs, Longs, returns=Nothing)
def note_step(reported, rows, produced, verified):
    """Count a step of sequences. produced, verified: int64 [B], numbers of committed and of verified draft tokens."""
    for index in range(len(rows)):
        own = reported[rows[index]]
        if produced[index] == 0 or own[TOKENS] == NOT_STARTED:
            continue
        if own[STEPS] == 0:
            own[VERIFIED] = verified[index]
        own[STEPS] += 1
