"""The table of running requests, its kernels and its pages once more, as slow objects and lists."""

from __future__ import annotations

from collections import Counter
from math import ceil

from engine.drafters.sources import SOURCE_NAMES
from engine.scheduling.kernels import CONTINUES, DROPPED, ENDED, FULL, UNDECIDED
from engine.scheduling.table import BY_END_TOKENS, BY_REQUEST, SCORED

LAST = len(SOURCE_NAMES) - 1


class NaivePages:
    """A page pool; pages are registered under any names."""

    def __init__(self, count):
        self.unused, self.idle, self.named, self.owners = list(range(count))[::-1], [], {}, Counter()

    @property
    def free_count(self):
        return len(self.unused) + len(self.idle)

    def take(self, count):
        taken = [self.unused.pop() if self.unused else self.idle.pop(0) for _ in range(count)]
        self.named = {name: page for name, page in self.named.items() if page not in taken}
        self.owners.update(taken)
        return sorted(taken)

    def share(self, page):
        if not self.owners[page]:
            self.idle.remove(page)
        self.owners[page] += 1

    def free(self, pages):
        self.owners.subtract(pages)
        for page in reversed(pages):
            if not self.owners[page]:
                (self.idle if page in self.named.values() else self.unused).append(page)

    def forget(self):
        self.unused, self.idle, self.named = [*self.unused, *sorted(self.idle)], [], {}


class NaiveRequest:
    """A row of the table. ends: tokens that end the output."""

    def __init__(self, number, prompt, limit, max_draft, end, kind, ends=()):
        self.number, self.tokens, self.prompt, self.limit = number, list(prompt), len(prompt), limit
        self.max_draft, self.end, self.kind, self.ends = max_draft, end, kind, ends
        self.computed = self.in_flight = self.registered = self.admission = self.on_device = self.steps = 0
        self.pages, self.row = [], None
        self.drafted, self.accepted = [0] * (LAST + 1), [0] * (LAST + 1)

    def columns(self):
        """The columns of its row, without the address of its tokens."""
        return [self.number, len(self.tokens), self.prompt, self.limit, self.computed, self.in_flight, len(self.pages),
                self.registered, self.max_draft, self.end, self.kind, self.admission, self.on_device, self.steps,
                *self.drafted, *self.accepted]  # fmt: skip

    def append(self, tokens, produced, sources):
        """Append the kept tokens of a step; sources: those of its verified draft tokens."""
        accepted = min(len(tokens), produced - 1)
        for place, code in enumerate(sources):
            self.drafted[min(code, LAST)] += 1
            self.accepted[min(code, LAST)] += place < accepted
        self.computed += 1 + accepted
        self.steps += 1
        self.tokens += tokens

    def cut(self, tokens):
        """Return the number of tokens of the output, and whether it ends after them."""
        found = [place + 1 for place, token in enumerate(tokens) if token in self.ends]
        return min([*found, len(tokens)]), bool(found) or len(self.tokens) + len(tokens) == self.limit


def missing(one, tokens, size):
    return max(0, ceil(tokens / size) - len(one.pages))


def plan_decoding(requests, pool, size, ahead):
    """See the kernel; a number instead of lists is that of missing pages."""
    decoding, others = [], []
    for one in requests:
        length = len(one.tokens)
        if one.end == SCORED:
            others += [one] * (one.computed < length)
        elif one.limit - length > (one.in_flight > 0) and one.computed < length - 1:
            others.append(one)
        elif one.limit - length > (one.in_flight > 0):
            count = missing(one, min(one.limit, one.computed + 1 + one.in_flight + ahead), size)
            if count > pool.free_count:
                return count - pool.free_count
            one.pages += pool.take(count)
            decoding.append(one)
    return decoding, others


def allocate_draft_room(requests, scheduled, pool, size, max_draft, watermark, needed, ahead):
    """See the kernel; returns what it plans, by sequence, and its results."""
    planned, kinds, lacking = [], 0, 0
    for one, count in zip(requests, scheduled, strict=True):
        wanted = min(one.max_draft, max_draft, one.limit - len(one.tokens) - 1 - (one.in_flight > 0))
        end = min(one.limit, one.computed + count + one.in_flight)
        useful = missing(one, min(one.limit, end + wanted + ahead), size)
        one.pages += pool.take(max(0, min(useful, pool.free_count - watermark)))
        room = max(0, min(wanted, len(one.pages) * size - needed - end))
        planned.append([room, one.admission, one.computed, end])
        kinds |= one.kind
        lacking += len(one.pages) - one.on_device
    return planned, kinds, lacking


def new_pages(requests, width):
    added = []
    for one in requests:
        added += [[one.row * width + place, page] for place, page in enumerate(one.pages) if place >= one.on_device]
        one.on_device = len(one.pages)
    return added


def counts(one, kept, outcome, produced, size):
    """Return the part of a sequence in the kernel's `Counts` after its tokens were committed."""
    if outcome in (DROPPED, UNDECIDED):
        return [0, 0, 0, outcome == UNDECIDED, 0]
    return [1, kept, min(kept, produced - 1), outcome != CONTINUES, one.computed // size > one.registered]


def commit(one, admission, tokens, sources, length, end_tokens):
    """Commit the tokens of a step that verified draft tokens of `sources`; return how many, and the outcome."""
    if one.admission != admission:
        return 0, DROPPED
    one.in_flight -= 1 + length
    if one.end == BY_REQUEST:
        return len(tokens), UNDECIDED
    found = [place + 1 for place, token in enumerate(tokens) if token in end_tokens and one.end == BY_END_TOKENS]
    kept = min([*found, len(tokens)])
    one.append(tokens[:kept], len(tokens), sources)
    return kept, ENDED if found else FULL if len(one.tokens) == one.limit else CONTINUES
