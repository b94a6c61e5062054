"""Kernels over the table of requests: plan a step, write its input for the device, and commit its results."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from engine.drafters.sources import SOURCE_NAMES
from engine.scheduling.pages import IDLE, POOL, UNUSED, take_pages
from engine.scheduling.table import (
    ACCEPTED,
    ADMISSION,
    BY_END_TOKENS,
    BY_REQUEST,
    COMPUTED,
    DRAFTED,
    END,
    IN_FLIGHT,
    KIND,
    LENGTH,
    LIMIT,
    MAX_DRAFT,
    ON_DEVICE,
    PAGES,
    REGISTERED,
    SCORED,
    STEPS,
    TEXT,
)
from ssd.kernels.jit import (
    FiveInts,
    Int,
    IntPair,
    IntRows,
    LongRows,
    Longs,
    Nothing,
    SourceCodes,
    Tokens,
    inline,
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


LACKING = -1
"""First result of `plan_decoding` if there are too few pages."""
ROOM, ADMITTED, COMPUTED_BEFORE, END_BEFORE_DRAFT = range(4)
"""Rows of what `allocate_draft_room` plans: the largest number of draft tokens of each sequence, its ADMISSION, its
COMPUTED, and an upper bound of the number of its tokens in the cache after the step, without the draft."""
PLANNED = 4


@inline
def _end_after(row, scheduled):
    """Return the largest number of tokens in the cache after `scheduled` more, without drafts."""
    return min(row[COMPUTED] + scheduled + row[IN_FLIGHT], row[LIMIT])


@inline
def _free(pool):
    return pool.counts[UNUSED] + pool.counts[IDLE]


@inline
def _append_pages(row, table, pool, tokens, most, page_size):
    """Append pages for `tokens` tokens to a page table, at most `most` of them."""
    held = row[PAGES]
    added = min((tokens + page_size - 1) // page_size - held, most)
    if added > 0:
        take_pages(pool, table[held : held + added])
        row[PAGES] = held + added


@kernel(LongRows, IntRows, POOL, Longs, Int, Int, Longs, Longs, returns=IntPair)
def plan_decoding(state, tables, pool, order, page_size, ahead, decoding, others):
    """Find the sequences whose tokens are computed but for the last one, and allocate pages for it.

    order: int64 [R], rows of the running sequences. ahead: number of further slots that a step needs. Writes the rows
    that decode to `decoding`, and those with prompt tokens to run to `others`, and returns their numbers. Neither has
    sequences whose remaining tokens steps in flight may produce. If there are too few pages, returns LACKING and the
    number of missing ones; the call can be repeated.
    """
    count = rest = 0
    for index in order:
        row = state[index]
        room = row[LIMIT] - row[LENGTH]
        if row[END] == SCORED:
            if row[COMPUTED] < row[LENGTH]:
                others[rest] = index
                rest += 1
            continue
        # Each step in flight commits at least one token.
        if room <= min(row[IN_FLIGHT], 1):
            continue
        if row[COMPUTED] < row[LENGTH] - 1:
            others[rest] = index
            rest += 1
            continue
        end = min(_end_after(row, 1) + ahead, row[LIMIT])
        missing = (end + page_size - 1) // page_size - row[PAGES] - _free(pool)
        if missing > 0:
            return LACKING, missing
        _append_pages(row, tables[index], pool, end, end, page_size)
        decoding[count] = index
        count += 1
    return count, rest


@kernel(LongRows, IntRows, POOL, Longs, Longs, Int, Int, Int, Int, Int, LongRows, returns=IntPair)
def allocate_draft_room(state, tables, pool, rows, chunks, page_size, max_draft, watermark, needed, ahead, planned):
    """Allocate pages for drafts after the scheduled tokens of sequences, as far as more than `watermark` are free.

    rows: int64 [B]. chunks: int64 [at most B], numbers of scheduled tokens of the last of them; the others run one
    token. needed: number of slots after the draft without which it is cut. ahead: number of slots after it that are
    useful. Writes `planned`, int64 [PLANNED, B]. Returns all bits of KIND of the sequences, and the number of pages
    that their page tables on the device lack.
    """
    kinds = lacking = 0
    for at in range(len(rows)):
        index, chunk = rows[at], at + len(chunks) - len(rows)
        row = state[index]
        # The target adds a bonus token after the draft, and each step in flight commits at least one token.
        left = row[LIMIT] - row[LENGTH] - 1 - min(row[IN_FLIGHT], 1)
        wanted = min(row[MAX_DRAFT], max_draft, left)
        end = _end_after(row, 1 if chunk < 0 else chunks[chunk])
        longest = min(end + wanted + ahead, row[LIMIT])
        _append_pages(row, tables[index], pool, longest, max(0, _free(pool) - watermark), page_size)
        planned[ROOM, at] = max(0, min(wanted, row[PAGES] * page_size - end - needed))
        planned[ADMITTED, at], planned[COMPUTED_BEFORE, at] = row[ADMISSION], row[COMPUTED]
        planned[END_BEFORE_DRAFT, at] = end
        kinds |= row[KIND]
        lacking += row[PAGES] - row[ON_DEVICE]
    return kinds, lacking
