"""Kernels that plan a step and account for it, for all running sequences at once; see `engine.scheduling.table`."""

from __future__ import annotations

from engine.scheduling.pages import IDLE, POOL, UNUSED, take_pages
from engine.scheduling.table import (
    ADMISSION,
    COMPUTED,
    END,
    IN_FLIGHT,
    KIND,
    LENGTH,
    LIMIT,
    MAX_DRAFT,
    ON_DEVICE,
    PAGES,
    SCORED,
)
from ssd.kernels.jit import Int, IntPair, IntRows, LongRows, Longs, inline, kernel

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
