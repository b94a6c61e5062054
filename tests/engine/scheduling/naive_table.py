"""The table of running requests, its kernels and its pages once more, as slow objects and lists."""

from __future__ import annotations

from math import ceil

from engine.drafters.sources import SOURCE_NAMES
from engine.scheduling.commit import CONTINUES, DROPPED, ENDED, FULL, UNDECIDED
from engine.scheduling.request import FinishReason
from engine.scheduling.table import ABSENT, BY_END_TOKENS, BY_REQUEST, SCORED, rows_for

SOURCES = len(SOURCE_NAMES)


class NaivePages:
    """A page pool; pages are registered under their whole text."""

    def __init__(self, count):
        self.unused = list(range(count - 1, -1, -1))
        self.idle, self.named = [], {}
        self.owners = [0] * count

    @property
    def free_count(self):
        return len(self.unused) + len(self.idle)

    def take(self, count):
        taken = []
        for _ in range(count):
            page = self.unused.pop() if self.unused else self.idle.pop(0)
            self.named = {key: other for key, other in self.named.items() if other != page}
            self.owners[page] = 1
            taken.append(page)
        return sorted(taken)

    def share(self, pages):
        for page in pages:
            if not self.owners[page]:
                self.idle.remove(page)
            self.owners[page] += 1

    def free(self, pages):
        for page in reversed(pages):
            self.owners[page] -= 1
            if not self.owners[page]:
                (self.idle if page in self.named.values() else self.unused).append(page)

    def find(self, keys, *, owned=False):
        found = []
        for key in keys:
            if key not in self.named or (owned and not self.owners[self.named[key]]):
                break
            found.append(self.named[key])
        return found


class NaiveRequest:
    """A row of the table. ends: tokens that end the output. has_prefix: whether it may use cached pages."""

    def __init__(self, number, prompt, limit, *, max_draft, end, kind, ends=(), salt="", has_prefix=True):
        self.number, self.tokens, self.prompt, self.limit = number, list(prompt), len(prompt), limit
        self.max_draft, self.end, self.kind = max_draft, end, kind
        self.ends, self.salt, self.has_prefix = ends, salt, has_prefix
        self.computed = self.in_flight = self.registered = self.admission = self.on_device = self.steps = 0
        self.pages, self.row = [], None
        self.drafted, self.accepted = [0] * SOURCES, [0] * SOURCES

    def columns(self):
        """The columns of its row, without the address of its tokens."""
        return [self.number, len(self.tokens), self.prompt, self.limit, self.computed, self.in_flight, len(self.pages),
                self.registered, self.max_draft, self.end, self.kind, self.admission, self.on_device, self.steps,
                *self.drafted, *self.accepted]  # fmt: skip

    def keys(self, count, size):
        return [(self.salt, *self.tokens[: (page + 1) * size]) for page in range(count)]

    def append(self, tokens, produced, sources):
        """Append the kept tokens of a step; sources: those of its verified draft tokens."""
        accepted = min(len(tokens), produced - 1)
        for place, code in enumerate(sources):
            self.drafted[min(code, SOURCES - 1)] += 1
            self.accepted[min(code, SOURCES - 1)] += place < accepted
        self.computed += 1 + accepted
        self.steps += 1
        self.tokens += tokens

    def cut(self, tokens):
        """Return the number of tokens of the output, and why it ends after them."""
        for place, token in enumerate(tokens):
            if token in self.ends:
                return place + 1, FinishReason.STOP
        return len(tokens), FinishReason.LENGTH if len(self.tokens) + len(tokens) == self.limit else None


def pages_for(tokens, size):
    return ceil(tokens / size)


def plan_decoding(requests, pool, size, ahead):
    """See the kernel; a number instead of lists is that of missing pages."""
    decoding, others = [], []
    for one in requests:
        length = len(one.tokens)
        if one.end == SCORED:
            others += [one] * (one.computed < length)
        elif one.limit - length > (one.in_flight > 0):
            if one.computed < length - 1:
                others.append(one)
                continue
            end = min(one.limit, min(one.limit, one.computed + 1 + one.in_flight) + ahead)
            missing = max(0, pages_for(end, size) - len(one.pages))
            if missing > pool.free_count:
                return missing - pool.free_count
            one.pages += pool.take(missing)
            decoding.append(one)
    return decoding, others


def allocate_draft_room(requests, scheduled, pool, size, max_draft, watermark, needed, ahead):
    rooms = []
    for one, count in zip(requests, scheduled, strict=True):
        wanted = min(one.max_draft, max_draft, one.limit - len(one.tokens) - 1 - (one.in_flight > 0))
        end = min(one.limit, one.computed + count + one.in_flight)
        missing = pages_for(min(one.limit, end + wanted + ahead), size) - len(one.pages)
        one.pages += pool.take(max(0, min(missing, pool.free_count - watermark)))
        rooms.append(max(0, min(wanted, len(one.pages) * size - needed - end)))
    return rooms


def new_pages(requests):
    added = []
    for one in requests:
        added += [[one.row, place, one.pages[place]] for place in range(one.on_device, len(one.pages))]
        one.on_device = len(one.pages)
    return added


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


class NaiveScheduler:
    """Follows an engine event by event."""

    def __init__(self, config, pages, size):
        self.config, self.size, self.pool = config, size, NaivePages(pages)
        self.watermark = ceil(config.watermark * pages)
        self.free_rows = list(range(rows_for(config.max_sequences)))[::-1]
        self.waiting, self.running = [], []
        self.admissions = self.preemptions = 0

    def plan(self):
        """Return producing requests, the numbers of their scheduled tokens and their draft rooms, and chunks."""
        self.admit()
        while isinstance(planned := plan_decoding(self.running, self.pool, self.size, 0), int):
            self.preempt(self.running[-1])
        decoding, prompts = planned
        chunks = self.plan_prompts(prompts, self.config.max_step_tokens - len(decoding) * (1 + self.config.max_draft))
        decoding = [one for one in decoding if one.admission]
        producing = [*decoding, *(one for one, _, produces in chunks if produces)]
        scheduled = [*[1] * len(decoding), *(count for _, count, produces in chunks if produces)]
        rooms = allocate_draft_room(
            producing, scheduled, self.pool, self.size, self.config.max_draft, self.watermark, 0, 0
        )
        return producing, scheduled, rooms, chunks

    def missing(self, one, tokens):
        return max(0, pages_for(tokens, self.size) - len(one.pages))

    def admit(self):
        reserved = sum(self.missing(one, len(one.tokens)) for one in self.running)
        while self.waiting and len(self.running) < self.config.max_sequences:
            one = self.waiting[0]
            shared = self.pool.find(one.keys(self.reusable(one), self.size), owned=True)
            needed = reserved + pages_for(len(one.tokens), self.size) - len(shared)
            is_full = self.running and needed + self.watermark > self.pool.free_count
            if is_full or (one.row is None and not self.free_rows):
                break
            self.running = sorted([*self.running, self.waiting.pop(0)], key=lambda each: each.number)
            self.admissions += 1
            one.admission, one.on_device = self.admissions, ABSENT
            one.row = self.free_rows.pop() if one.row is None else one.row
            self.reuse(one)
            reserved += self.missing(one, len(one.tokens))

    def plan_prompts(self, prompts, left):
        chunks, planned = [], set()
        for one in prompts:
            if not one.admission:
                continue
            self.reuse(one)
            place, length = len(one.pages), len(one.tokens)
            is_next = one.computed == place * self.size and place < self.reusable(one)
            if is_next and one.keys(place + 1, self.size)[place] in planned:
                continue
            end = min(length, one.computed + left - self.config.max_draft)
            if end < length and end - end % self.size > one.computed:
                end -= end % self.size
            if end <= one.computed or not self.grow(one, min(one.limit, end + one.in_flight)):
                continue
            left -= end - one.computed + self.config.max_draft
            full = end // self.size if self.config.prefix_cache else 0
            planned.update(one.keys(full, self.size)[one.registered :])
            chunks.append((one, end - one.computed, one.end != SCORED and end == length))
        return [chunk for chunk in chunks if chunk[0].admission]

    def grow(self, one, end):
        while (count := self.missing(one, end)) > self.pool.free_count:
            newest = self.running[-1]
            self.preempt(newest)
            if newest is one:
                return False
        one.pages += self.pool.take(count)
        return True

    def reusable(self, one):
        return (len(one.tokens) - 1) // self.size if self.config.prefix_cache and one.has_prefix else 0

    def reuse(self, one):
        before = len(one.pages)
        if one.computed == before * self.size and self.reusable(one) > before:
            found = self.pool.find(one.keys(self.reusable(one), self.size)[before:])
            self.pool.share(found)
            one.pages += found
            one.computed, one.registered = len(one.pages) * self.size, len(one.pages)

    def register(self, one):
        full = one.computed // self.size
        if self.config.prefix_cache and full > one.registered:
            for page, key in list(zip(one.pages, one.keys(full, self.size), strict=False))[one.registered :]:
                self.pool.named.setdefault(key, page)
            one.registered = full

    def stop(self, one):
        self.running.remove(one)
        one.admission = 0

    def preempt(self, one):
        self.stop(one)
        self.pool.free(one.pages)
        one.pages, one.computed, one.in_flight, one.registered = [], 0, 0, 0
        self.waiting = sorted([*self.waiting, one], key=lambda each: each.number)
        self.preemptions += 1

    def finish(self, one):
        if one in self.running:
            self.stop(one)
        if one in self.waiting:
            self.waiting.remove(one)
        if one.row is not None:
            self.pool.free(one.pages)
            self.free_rows.append(one.row)
            one.row = None
