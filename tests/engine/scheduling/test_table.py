"""The table of running requests and its kernels equal slow twins after each of many random events."""

from collections import Counter, deque

import numpy as np

from engine.drafters.tokens import copy_tokens
from engine.sampling.grammar import Grammar
from engine.sampling.stopping import Stopping
from engine.scheduling import kernels, table
from engine.scheduling.pages import PagePool
from engine.scheduling.request import Request, SamplingParams
from engine.scheduling.sequence import UNLIMITED, Sequence
from ssd.types import offsets_of
from tests.engine.chain import END, PAGE_SIZE, VOCAB
from tests.engine.integrity import idle_pages
from tests.engine.scheduling import naive_table as naive
from tests.engine.workload import random_record

SEEDS = range(40)
SETTINGS = [
    ({}, {}, table.BY_END_TOKENS, 0),
    ({"ignore_eos": True}, {"max_draft": 2}, table.BY_LENGTH, 0),
    ({"temperature": 1.0}, {"drafters": frozenset()}, table.BY_END_TOKENS, table.SAMPLED),
    ({"temperature": 1.0, "top_k": 3}, {}, table.BY_END_TOKENS, table.SAMPLED | table.TRUNCATES),
    ({"temperature": 1.0, "verification": "rejection"}, {}, table.BY_END_TOKENS, table.SAMPLED | table.NEEDS_HOST),
    ({"stop_token_ids": (5,)}, {}, table.BY_REQUEST, 0),
    ({"grammar": Grammar("json_object")}, {}, table.BY_REQUEST, table.HAS_GRAMMAR | table.NEEDS_HOST),
    ({"max_tokens": 0, "prompt_logprobs": 0}, {}, table.SCORED, table.NEEDS_HOST),
]
"""Settings of requests, and their values of END and KIND."""


class Requests:
    """Sequences in a table, with twins in `ones`, whose steps are planned, launched and read at random."""

    def __init__(self, seed):
        self.rng, self.seen = np.random.default_rng(seed), Counter()
        count = int(self.rng.integers(8, 30))
        self.table, self.pages = table.RequestTable(4, count), PagePool(count, PAGE_SIZE)
        self.twin_pages = naive.NaivePages(count)
        self.free_rows, self.admissions, self.arrivals = [4, 3, 2, 1, 0], 0, 0
        self.running, self.waiting, self.steps = [], [], deque()
        self.sequences = {}

    def run(self):
        events = [self.arrive, self.launch, self.launch, self.read, self.read, self.register]
        for _ in range(150):
            event = self.cancel if self.rng.random() < 0.03 else events[self.rng.integers(len(events))]
            event()
            self.check()
        while self.running or self.waiting:
            self.cancel()
            self.check()
        assert self.pages.free_count == self.pages.count
        return self.seen

    def check(self):
        held = [*self.running, *(one for one in self.waiting if one.row is not None)]
        assert {one.row for one in held} == {row for row, each in enumerate(self.table.sequences) if each is not None}
        assert self.table._free == self.free_rows
        assert not self.table.state[self.free_rows].any()
        for one in held:
            sequence = self.table.sequences[one.row]
            state = self.table.state[one.row]
            assert [*state[: table.TEXT], *state[table.TEXT + 1 :]] == one.columns()
            assert (sequence.tokens.tolist(), sequence.pages) == (one.tokens, one.pages)
            assert sequence.recorded_rest.tolist() == one.record[len(one.tokens) - one.prompt :][: sequence.room]
        rows, texts = np.array([one.row for one in held], np.int64), [one.tokens[one.number % 2 :] for one in held]
        copied, starts = np.zeros(sum(map(len, texts)), np.uint32), self.table.state[rows, table.SEQUENCE_ID] % 2
        offsets = offsets_of(np.array([len(text) for text in texts], np.int64))
        copy_tokens(self.table.state[rows, table.TEXT] + 4 * starts, offsets, copied)
        assert copied.tolist() == [token for text in texts for token in text]
        assert self.pages.arrays.unused[: self.pages.arrays.counts[0]].tolist() == self.twin_pages.unused
        assert idle_pages(self.pages) == self.twin_pages.idle

    def arrive(self):
        if self.rng.random() < 0.5 or not self.waiting:
            sampling, fields, end, kind = SETTINGS[self.rng.integers(len(SETTINGS))]
            sampling = SamplingParams(**{"max_tokens": int(self.rng.integers(1, 15)), **sampling})
            prompt, record = self.rng.integers(0, VOCAB, self.rng.integers(1, 13)), random_record(self.rng)
            request = Request(prompt.astype(np.uint32), sampling, recorded=record, **fields)
            limit, most = len(prompt) + sampling.max_tokens, fields.get("max_draft", UNLIMITED)
            sequence = Sequence(self.arrivals, request, limit, Stopping(request, (END,)))
            most, ends = (most if request.is_drafted else 0), {END, *sampling.stop_token_ids}
            one = naive.NaiveRequest(self.arrivals, prompt.tolist(), limit, most, end, kind, ends)
            one.record = [] if record is None else record.tolist()
            self.sequences[one] = sequence
            self.waiting.append(one)
            self.arrivals += 1
            self.seen[end, kind] += 1
        one = self.waiting[0]
        if one.row is None and not self.table.has_room:
            self.seen["no row"] += 1
            return
        if one.row is None:
            self.table.add(self.sequences[one])
            one.row = self.free_rows.pop()
        self.table.admit(self.sequences[one])
        self.admissions += 1
        one.admission, one.on_device = self.admissions, table.ABSENT
        self.running.append(self.waiting.pop(0))
        self.running.sort(key=lambda each: each.number)

    def plan(self):
        """Return the requests that decode; those with prompt tokens to run run some of them."""
        state, ahead = self.table.state, int(self.rng.integers(2))
        while True:
            rows = np.array([one.row for one in self.running], np.int64)
            decoding, others = np.empty((2, len(rows)), np.int64)
            arguments = state, self.table.pages, self.pages.arrays, rows, PAGE_SIZE, ahead, decoding, others
            count, rest = kernels.plan_decoding(*arguments)
            planned = naive.plan_decoding(self.running, self.twin_pages, PAGE_SIZE, ahead)
            if count != kernels.LACKING:
                break
            assert rest == planned
            self.preempt(self.running[-1])
        assert decoding[:count].tolist() == [one.row for one in planned[0]]
        assert others[:rest].tolist() == [one.row for one in planned[1]]
        for one in planned[1]:
            tokens = int(self.rng.integers(1, len(one.tokens) - one.computed + (one.end == table.SCORED)))
            added = naive.missing(one, one.computed + tokens, PAGE_SIZE)
            if added <= self.twin_pages.free_count:
                one.pages += self.twin_pages.take(added)
                self.sequences[one].add_pages(self.pages.allocate(added))
                one.computed += tokens
                self.sequences[one].computed += tokens
        return planned[0]

    def launch(self):
        """Plan a step with random drafts and launch it, unless two are in flight."""
        if len(self.steps) == 2 or not (ones := self.plan()):
            return
        state, rows, rng = self.table.state, np.array([one.row for one in ones], np.int64), self.rng
        planned = np.empty((kernels.PLANNED, len(rows)), np.int64)
        settings = [PAGE_SIZE, *rng.integers((1, 0, 0, 0), (7, 5, 2, 3)).tolist()]
        tables = self.table.pages
        # Those that decode run one token; a larger number has the same effect on pages as that of a chunk.
        chunks = rng.integers(1, 4, rng.integers(0, len(rows) + 1))
        scheduled = [*[1] * (len(rows) - len(chunks)), *chunks.tolist()]
        found = kernels.allocate_draft_room(state, tables, self.pages.arrays, rows, chunks, *settings, planned)
        expected, *sums = naive.allocate_draft_room(ones, scheduled, self.twin_pages, *settings)
        assert (planned.T.tolist(), list(found)) == (expected, sums)
        rooms = planned[kernels.ROOM]
        sizes = rng.integers(0, rooms + 1)
        offsets, lengths = offsets_of(sizes), rng.integers(0, sizes + 1)
        tokens = rng.integers(0, VOCAB, offsets[-1]).astype(np.uint32)
        sources = rng.choice([0, 3, 13, 14, 255], offsets[-1]).astype(np.uint8)
        inputs, added = np.zeros((len(rows), 8), np.int32), np.empty((2, 200), np.int64)
        for one in ones:
            one.on_device = max(one.on_device, 0)
        state[rows, table.ON_DEVICE] = np.maximum(state[rows, table.ON_DEVICE], 0)
        count = kernels.new_pages(state, tables, rows, 30, added)
        assert added[:, :count].T.tolist() == naive.new_pages(ones, 30)
        kernels.write_inputs(state, rows, tokens, offsets, lengths, inputs)
        for one, first, length, line in zip(ones, offsets.tolist(), lengths.tolist(), inputs.tolist(), strict=False):
            assert line == [one.row, 1 + length, *tokens[first : first + length], *[0] * (6 - length)]
            one.in_flight += 1 + length
        self.steps.append((ones, rows, state[rows, table.ADMISSION], sources, offsets, lengths))

    def read(self):
        """Commit random results of the oldest step, and free the rows and pages of outputs that end."""
        if not self.steps:
            return
        ones, rows, admissions, sources, offsets, lengths = self.steps.popleft()
        rooms = [max(1, one.limit - len(one.tokens)) for one in ones]
        verified = self.rng.integers(0, lengths + 1)
        produced = np.minimum(self.rng.integers(1, verified + 2), rooms)
        results = np.column_stack((produced, verified, self.rng.integers(0, VOCAB, (len(rows), 7)))).astype(np.int32)
        for line, one in zip(results, ones, strict=True):
            recorded = one.record[len(one.tokens) - one.prompt :][: line[0]]
            line[2 : 2 + len(recorded)] = recorded
        kept, outcomes = np.empty((2, len(rows)), np.int64)
        state, ends = self.table.state, np.array([END], np.uint32)
        counts = kernels.commit_results(
            state, rows, admissions, results, sources, offsets, lengths, ends, PAGE_SIZE, kept, outcomes
        )
        twin_counts = np.zeros(len(kernels.Counts._fields), int)
        for at, one in enumerate(ones):
            tokens, known = results[at, 2 : 2 + produced[at]], sources[int(offsets[at]) :][: verified[at]]
            expected = naive.commit(one, admissions[at], tokens.tolist(), known.tolist(), int(lengths[at]), (END,))
            assert (kept[at], outcomes[at]) == expected
            twin_counts += naive.counts(one, *expected, len(tokens), PAGE_SIZE)
            is_ended = outcomes[at] in (kernels.ENDED, kernels.FULL)
            if outcomes[at] == kernels.UNDECIDED:
                cut, is_ended = one.cut(tokens.tolist())
                one.append(tokens[:cut].tolist(), len(tokens), known.tolist())
                accepted = known[: min(cut, len(tokens) - 1)]
                self.sequences[one].commit(tokens[:cut].astype(np.uint32), drafted=known, accepted=accepted)
            self.seen["outcome", int(outcomes[at])] += 1
            if is_ended:
                self.remove(one)
        assert list(counts) == twin_counts.tolist()

    def register(self):
        """Register the full pages of a request, so that they are idle once it has freed them."""
        if self.running:
            one = self.running[self.rng.integers(len(self.running))]
            for place in range(one.registered, one.computed // PAGE_SIZE):
                name = one.number, place
                if name not in self.twin_pages.named:
                    self.twin_pages.named[name] = one.pages[place]
                self.pages.register(self.sequences[one].held_pages[place : place + 1], np.array([name], np.uint64))
            one.registered = self.sequences[one].state[table.REGISTERED] = one.computed // PAGE_SIZE

    def cancel(self):
        if ones := [*self.running, *self.waiting]:
            self.remove(ones[self.rng.integers(len(ones))])

    def preempt(self, one):
        self.stop(one)
        self.sequences[one].restart()
        one.pages, one.computed, one.in_flight, one.registered = [], 0, 0, 0
        self.waiting.insert(0, one)
        self.seen["preempted"] += 1

    def stop(self, one):
        """Let a request run no more, without its pages."""
        self.running.remove(one)
        self.pages.free(self.sequences[one].held_pages)
        self.twin_pages.free(one.pages)
        one.admission = 0

    def remove(self, one):
        if one in self.running:
            self.stop(one)
        else:
            self.waiting.remove(one)
        if one.row is not None:
            self.table.remove(self.sequences[one])
            self.free_rows.append(one.row)
            one.row = None


def test_the_table_and_its_kernels_equal_their_twins_after_each_event():
    seen = sum((Requests(seed).run() for seed in SEEDS), Counter())
    outcomes = [("outcome", outcome) for outcome in range(5)]
    events = ("preempted", "no row", *outcomes, *{each[2:] for each in SETTINGS})
    assert min(seen[event] for event in events) >= 20, seen
