"""Kernels that write a step's input for the device and commit its results, for the whole batch at once."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.drafters.sources import SOURCE_NAMES
from engine.scheduling.table import (
    ACCEPTED,
    ADMISSION,
    BY_END_TOKENS,
    BY_REQUEST,
    COMPUTED,
    DRAFTED,
    END,
    IN_FLIGHT,
    LENGTH,
    LIMIT,
    ON_DEVICE,
    PAGES,
    REGISTERED,
    STEPS,
    TEXT,
)
from ssd.kernels.jit import (
    FiveInts,
    Int,
    IntRows,
    LongRows,
    Longs,
    Nothing,
    SourceCodes,
    Tokens,
    kernel,
    poke,
)

DROPPED, CONTINUES, ENDED, FULL, UNDECIDED = range(5)
"""Outcomes of a step for a sequence: it does not run any more; it continues; it ended with an end token, or at its
largest length; its tokens are not committed, because its request decides where it ends."""

SLOT, ROWS, FIRST_DRAFT = range(3)
"""Columns of a step's input: the sequence's slot on the device, its number of rows, and its first draft token."""
PRODUCED, VERIFIED, FIRST_TOKEN = range(3)
"""Columns of a step's results: numbers of produced tokens and of verified draft tokens, and the first token."""

SOURCES = len(SOURCE_NAMES)


class Counts(NamedTuple):
    """What `commit_results` did, without the sequences whose outcome is UNDECIDED but for `ending`."""

    producing: int
    """Number of sequences with committed tokens."""
    committed: int
    """Number of committed tokens."""
    accepted: int
    """Number of accepted draft tokens."""
    ending: int
    """Number of sequences whose output ends, or may end."""
    filled: int
    """Number of sequences with a page that is full and not in the prefix cache."""


@kernel(LongRows, Longs, Tokens, Tokens, Longs, IntRows, returns=Nothing)
def write_inputs(state, rows, draft_tokens, offsets, lengths, table):
    """Write the input of a step, int32 [B, FIRST_DRAFT + longest draft], and count its tokens as in flight.

    rows: int64 [B]. draft_tokens, offsets: as in `ssd.types.DraftBatch`. lengths: int64 [B], how many tokens of each
    draft the step verifies.
    """
    for index in range(len(rows)):
        first = np.int64(offsets[index])
        table[index, SLOT] = rows[index]
        table[index, ROWS] = 1 + lengths[index]
        for place in range(lengths[index]):
            table[index, FIRST_DRAFT + place] = draft_tokens[first + place]
        state[rows[index], IN_FLIGHT] += 1 + lengths[index]


@kernel(LongRows, IntRows, Longs, Int, LongRows, returns=Int)
def new_pages(state, tables, rows, width, added):
    """Write the pages that page tables of sequences on the device lack: place and page, int64 [2, N or more].

    rows: int64 [B]. width: length of a page table on the device, where a place is that in all tables, one after the
    other. Returns N.
    """
    count = 0
    for row in rows:
        for place in range(state[row, ON_DEVICE], state[row, PAGES]):
            added[0, count], added[1, count] = row * width + place, tables[row, place]
            count += 1
        state[row, ON_DEVICE] = state[row, PAGES]
    return count


@kernel(LongRows, Longs, Longs, IntRows, SourceCodes, Tokens, Longs, Tokens, Int, Longs, Longs, returns=FiveInts)
def commit_results(state, rows, admissions, results, sources, offsets, lengths, end_tokens, page_size, kept, outcomes):
    """Commit the tokens of a step up to the end of each output, and count its draft tokens.

    rows, admissions: int64 [B], of the step's sequences. results: int32 [B, FIRST_TOKEN + longest output]. sources,
    offsets: as in `ssd.types.DraftBatch`. lengths: int64 [B], see `write_inputs`. end_tokens: uint32, those of the
    model. Writes the number of committed tokens and the outcome of each sequence, int64 [B] each.

    Returns `Counts` of the sequences.
    """
    producing = committed = accepted_tokens = ending = filled = 0
    for index in range(len(rows)):
        row = state[rows[index]]
        kept[index] = 0
        if row[ADMISSION] != admissions[index]:
            outcomes[index] = DROPPED
            continue
        row[IN_FLIGHT] -= 1 + lengths[index]
        produced = results[index, PRODUCED]
        if row[END] == BY_REQUEST:
            outcomes[index] = UNDECIDED
            kept[index] = produced
            ending += 1
            continue
        end, outcome = produced, CONTINUES
        if row[END] == BY_END_TOKENS:
            for place in range(produced):
                for token in end_tokens:
                    if results[index, FIRST_TOKEN + place] == token and outcome == CONTINUES:
                        end, outcome = place + 1, ENDED
        if outcome == CONTINUES and row[LENGTH] + produced == row[LIMIT]:
            outcome = FULL
        for place in range(end):
            poke(row[TEXT], row[LENGTH] + place, np.uint32(results[index, FIRST_TOKEN + place]))
        accepted = end if end < produced else produced - 1
        first = np.int64(offsets[index])
        for place in range(results[index, VERIFIED]):
            code = sources[first + place]
            source = np.int64(code) if code < SOURCES else SOURCES - 1
            row[DRAFTED + source] += 1
            row[ACCEPTED + source] += place < accepted
        row[COMPUTED] += 1 + accepted
        row[LENGTH] += end
        row[STEPS] += 1
        kept[index], outcomes[index] = end, outcome
        producing += 1
        committed += end
        accepted_tokens += accepted
        ending += outcome != CONTINUES
        filled += row[COMPUTED] // page_size > row[REGISTERED]
    return producing, committed, accepted_tokens, ending, filled
