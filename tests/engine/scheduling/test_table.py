"""The table of running requests, its kernels and the engine's use of them equal slow twins, event by event."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

import engine.engine
import engine.executor.graph
import engine.scheduling.scheduler
from engine.config import EngineConfig
from engine.executor.shapes import GREEDY
from engine.sampling.grammar import Grammar
from engine.scheduling import commit, planning
from engine.scheduling.pages import PagePool
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.scheduling.sequence import UNLIMITED, Sequence
from engine.scheduling.table import (
    ABSENT,
    ADMISSION,
    BY_END_TOKENS,
    BY_LENGTH,
    BY_REQUEST,
    END,
    HAS_GRAMMAR,
    IN_FLIGHT,
    KIND,
    NEEDS_HOST,
    ON_DEVICE,
    PAGES,
    SAMPLED,
    SCORED,
    TEXT,
    TRUNCATES,
    RequestTable,
)
from ssd.types import DraftBatch, Path, offsets_of
from tests.engine import chain
from tests.engine.chain import PAGE_SIZE, VOCAB, chain_engine
from tests.engine.scheduling import naive_table as naive
from tests.engine.workload import RandomBackoff, random_record

SEEDS = range(40)
SETTINGS = [
    ({}, {}, BY_END_TOKENS, 0),
    ({"ignore_eos": True}, {}, BY_LENGTH, 0),
    ({"temperature": 1.0}, {"max_draft": 1}, BY_END_TOKENS, SAMPLED),
    ({"temperature": 1.0, "top_k": 3}, {"drafters": frozenset()}, BY_END_TOKENS, SAMPLED | TRUNCATES),
    ({"stop_token_ids": (5,)}, {}, BY_REQUEST, 0),
    ({}, {"hints": np.array([1, 2], np.uint32)}, BY_REQUEST, 0),
    ({"temperature": 1.0, "verification": "rejection"}, {}, BY_END_TOKENS, SAMPLED | NEEDS_HOST),
    ({"logprobs": 0}, {}, BY_REQUEST, NEEDS_HOST),
    ({"max_tokens": 0, "prompt_logprobs": 0}, {}, SCORED, NEEDS_HOST),
]
"""Settings of requests, and their values of END and KIND."""


def test_a_request_with_a_grammar_needs_the_host():
    sampling = SamplingParams(grammar=Grammar("json_object", ""))
    state = Sequence(0, Request(np.ones(1, np.uint32), sampling), 9).state
    assert state[[END, KIND]].tolist() == [BY_REQUEST, HAS_GRAMMAR | NEEDS_HOST]


def check_pool(pages, twin):
    assert pages.arrays.unused[: pages.arrays.counts[0]].tolist() == twin.unused
    assert pages._idle() == twin.idle
    assert pages.arrays.owners.tolist() == twin.owners


def check_row(table, one, text):
    assert [*table.state[one.row, :TEXT], *table.state[one.row, TEXT + 1 :]] == one.columns()
    assert text[: len(one.tokens)].tolist() == one.tokens
    assert table.pages[one.row, : len(one.pages)].tolist() == one.pages


def random_rows(rng):
    """A table with a random state in each row, the texts of the rows, and the twins of all."""
    table, pages, twin_pages = RequestTable(5, 20), PagePool(20, PAGE_SIZE), naive.NaivePages(20)
    idle = pages.allocate(4)
    pages.register(idle, np.arange(8, dtype=np.uint64).reshape(4, 2))
    pages.free(idle)
    twin_pages.named = dict(enumerate(twin_pages.take(4)))
    twin_pages.free(idle.tolist())
    texts, ones = [], []
    for row, state in enumerate(table.state):
        limit, length = (1 + np.sort(rng.integers(1, 32, 2))[::-1]).tolist()
        one = naive.NaiveRequest(row + 10, rng.integers(0, VOCAB, length).tolist(), limit, kind=0,
                                 max_draft=int(rng.choice([0, 2, UNLIMITED])), end=int(rng.integers(4)))  # fmt: skip
        one.row, one.computed = row, int(length - 1 if rng.random() < 0.7 else rng.integers(length))
        one.in_flight, one.admission = int(rng.integers(4)), int(rng.integers(1, 9))
        count = min(naive.pages_for(one.computed, PAGE_SIZE), twin_pages.free_count)
        one.pages, one.on_device = twin_pages.take(count), int(rng.integers(count + 1))
        table.pages[row, :count] = pages.allocate(count)
        texts.append(np.zeros(limit, np.uint32))
        texts[-1][:length] = one.tokens
        state[:TEXT], state[TEXT + 1 :], state[TEXT] = one.number, one.columns()[1:], texts[-1].ctypes.data
        ones.append(one)
    return table, pages, texts, ones, twin_pages


@pytest.mark.parametrize("block", range(4))
def test_each_kernel_equals_its_twin(block):
    seen = Counter()
    for seed in range(block * 60, block * 60 + 60):
        rng = np.random.default_rng(seed)
        table, pages, texts, ones, twin_pages = random_rows(rng)
        arrays, state = pages.arrays, table.state

        def check(table=table, pages=pages, texts=texts, ones=ones, twin_pages=twin_pages):
            check_pool(pages, twin_pages)
            for one in ones:
                check_row(table, one, texts[one.row])

        check()
        order = [ones[row] for row in rng.permutation(len(ones))]
        rows = np.array([one.row for one in order])
        decoding, others = np.empty((2, len(rows)), np.int64)
        ahead = int(rng.integers(3))
        found = planning.plan_decoding(state, table.pages, arrays, rows, PAGE_SIZE, ahead, decoding, others)
        planned = naive.plan_decoding(order, twin_pages, PAGE_SIZE, ahead)
        if isinstance(planned, int):
            assert found == (planning.LACKING, planned)
            seen["lacking"] += 1
        else:
            assert decoding[: found[0]].tolist() == [one.row for one in planned[0]]
            assert others[: found[1]].tolist() == [one.row for one in planned[1]]
        check()

        scheduled, rooms = rng.integers(1, 4, len(rows)), np.empty(len(rows), np.int64)
        settings = [int(value) for value in (PAGE_SIZE, *rng.integers((1, 0, 0, 0), (7, 9, 2, 4)))]
        planning.allocate_draft_room(state, table.pages, arrays, rows, scheduled, *settings, rooms)
        assert rooms.tolist() == naive.allocate_draft_room(order, scheduled.tolist(), twin_pages, *settings)
        check()

        offsets = offsets_of(rng.integers(0, 4, len(rows)))
        tokens = rng.integers(0, VOCAB, offsets[-1]).astype(np.uint32)
        sources = rng.choice([0, 3, 13, 14, 255], offsets[-1]).astype(np.uint8)
        lengths = rng.integers(0, np.diff(offsets.astype(np.int64)) + 1)
        inputs = np.zeros((len(rows), 5), np.int32)
        commit.write_inputs(state, rows, tokens, offsets, lengths, inputs)
        for one, first, length, line in zip(order, offsets.tolist(), lengths.tolist(), inputs.tolist(), strict=False):
            one.in_flight += 1 + length
            assert line == [one.row, 1 + length, *tokens[first : first + length], *[0] * (3 - length)]
        check()

        added = np.empty((3, 90), np.int32)
        count = commit.new_pages(state, table.pages, rows, added)
        assert added[:, :count].T.tolist() == naive.new_pages(order)
        check()

        left = [one.limit - len(one.tokens) for one in order]
        verified = rng.integers(0, lengths + 1)
        produced = np.minimum(rng.integers(1, verified + 2), left)
        results = np.column_stack((produced, verified, rng.integers(0, VOCAB, (len(rows), 4)))).astype(np.int32)
        admissions = state[rows, ADMISSION] + (rng.random(len(rows)) < 0.2)
        kept, outcomes = np.empty((2, len(rows)), np.int64)
        ends = np.array([2, 5], np.uint32)
        commit.commit_results(
            state, rows, admissions, results, sources, offsets, lengths, ends, kept, outcomes
        )
        for at, one in enumerate(order):
            first, new = int(offsets[at]), results[at, 2 : 2 + produced[at]].tolist()
            known = sources[first : first + verified[at]].tolist()
            expected = naive.commit(one, admissions[at], new, known, int(lengths[at]), (2, 5))
            assert (kept[at], outcomes[at]) == expected
            seen[expected[1]] += 1
        check()

        starts = [int(rng.integers(len(one.tokens) + 1)) for one in order]
        parts = [one.tokens[start:] for one, start in zip(order, starts, strict=True)]
        copied = np.zeros(sum(map(len, parts)), np.uint32)
        addresses = np.array([texts[one.row].ctypes.data + 4 * start for one, start in zip(order, starts, strict=True)])
        commit.copy_tokens(addresses, offsets_of(np.array([len(part) for part in parts])), copied)
        assert copied.tolist() == sum(parts, [])
    assert min(seen[outcome] for outcome in ("lacking", *range(5))) >= 5, seen


class RandomDrafter:
    """Drafts random tokens of random sources, and keeps the texts of what it was told."""

    def __init__(self, rng):
        self.rng = rng
        self.texts = {}

    def start(self, sequence_id, prompt):
        self.texts[sequence_id] = prompt.tolist()

    def draft(self, progress):
        for at, sequence_id in enumerate(progress.sequence_ids.tolist()):
            self.texts[sequence_id] += progress.tokens[progress.offsets[at] : progress.offsets[at + 1]].tolist()
        sizes = self.rng.integers(0, progress.max_draft.astype(np.int64) + 1)
        batch = DraftBatch.from_paths([
            Path(self.rng.integers(0, VOCAB, size).astype(np.uint32), np.ones(size, np.float32)) for size in sizes
        ])  # fmt: skip
        return replace(batch, source=self.rng.choice([0, 2, 13, 14, 255], len(batch.tokens)).astype(np.uint8))

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.texts[sequence_id] += tokens.tolist()


class RandomDevice:
    """Replaces the steps of fixed shapes: accepts random numbers of draft tokens and produces random tokens."""

    greedy = GREEDY

    def __init__(self, rng, table):
        self.rng, self.table, self.state = rng, table, self
        self.slots = {}

    def kind_of(self, samplings, vocab_size):
        return GREEDY

    def install(self, slots, sequences):
        for slot, one in zip(slots, sequences, strict=True):
            text = [*one.tokens.tolist(), *one.recorded_rest.tolist()]
            self.slots[slot] = SimpleNamespace(length=len(one), limit=one.max_length, text=text, pages={})

    def add_pages(self, added):
        for slot, place, page in added.T.tolist():
            self.slots[slot].pages[place] = page

    def run(self, inputs, kind):
        results = np.zeros((len(inputs.table), 2 + inputs.table.shape[1] - 1), np.int32)
        for line, (slot, rows, *_), context in zip(results, inputs.table.tolist(), inputs.contexts, strict=True):
            one, held = self.slots[slot], self.table.pages[slot, : self.table.state[slot, PAGES]].tolist()
            assert [one.pages[place] for place in range(len(held))] == held
            assert len(held) * PAGE_SIZE >= min(context + rows, one.limit) > one.length - 1
            verified = int(self.rng.integers(rows))
            count = min(int(self.rng.integers(1, verified + 2)), one.limit - one.length)
            recorded = one.text[one.length :][:count]
            one.length += count
            line[:2] = count, verified
            line[2:] = self.rng.choice(VOCAB, len(line) - 2, p=[0.04, *[0.96 / (VOCAB - 1)] * (VOCAB - 1)])
            line[2 : 2 + len(recorded)] = recorded
        return SimpleNamespace(read=lambda: results)


def after(owner, name, act):
    """Call `act` with the result and the arguments of each call of a method."""
    original = getattr(owner, name)

    def call(*arguments, **options):
        result = original(*arguments, **options)
        act(result, *arguments, **options)
        return result

    setattr(owner, name, call)


class Followed:
    """An engine with random results, and a twin that is compared with it after each event."""

    def __init__(self, seed):
        self.rng = rng = np.random.default_rng(seed)
        self.seen, self.ones, self.steps, self.records = Counter(), {}, {}, {}
        most, draft, pages = int(rng.integers(1, 6)), int(rng.integers(0, 5)), int(rng.integers(6, 25))
        config = EngineConfig(
            max_sequences=most, max_draft=draft, max_step_tokens=most * (1 + draft) + int(rng.integers(0, 30)),
            prefix_cache=bool(rng.random() < 0.8), watermark=float(rng.choice([0.0, 0.1])), page_size=PAGE_SIZE,
        )  # fmt: skip
        selection = RandomBackoff(rng) if seed % 2 else None
        self.drafter = RandomDrafter(rng)
        self.engine = chain_engine(config, pages, self.drafter, selection, in_flight="any")
        self.scheduler = self.engine.scheduler
        self.engine._graph.grid = RandomDevice(rng, self.scheduler.table)
        self.twin = naive.NaiveScheduler(config, pages, PAGE_SIZE)
        for owner, name, act in (
            (self.scheduler, "plan", self.planned), (self.scheduler, "register_rows", self.registered),
            (self.engine, "_count_launched", self.launched), (self.engine, "_commit_rows", self.committed),
            (self.engine._executor, "launch", self.launched_eager), (self.engine, "_finish", self.finished),
        ):  # fmt: skip
            after(owner, name, act)

    def run(self):
        for _ in range(50):
            while self.rng.random() < 0.45:
                self.arrive()
            if self.rng.random() < 0.1 and self.ones:
                self.engine.cancel(int(self.rng.choice(list(self.ones))))
            self.engine.step()
        while self.engine.has_work:
            self.engine.step()
        assert self.twin.pool.free_count == self.scheduler.pages.count
        assert len(self.twin.free_rows) == len(self.scheduler.table.sequences)
        assert self.engine.drafter_failures.count == 0
        self.seen["preempted"] += self.twin.preemptions
        return self.seen

    def arrive(self):
        rng = self.rng
        sampling, fields, end, kind = SETTINGS[rng.integers(len(SETTINGS)) if rng.random() < 0.5 else 0]
        prompt = np.append(np.arange(rng.integers(0, 13)) % 3, rng.integers(0, VOCAB, rng.integers(1, 5)))
        fields = {"recorded": random_record(rng) if end != SCORED else None, "salt": str(rng.integers(2)), **fields}
        if fields.get("max_draft", 0) > self.engine.max_draft:
            return
        sampling = SamplingParams(**{"max_tokens": int(rng.integers(1, 12)), **sampling})
        request = Request(prompt.astype(np.uint32), sampling, **fields)
        number = self.engine.add(request)
        limit = self.engine.check(request)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (chain.END,))}
        longest = request.max_draft if request.max_draft is not None else UNLIMITED
        one = naive.NaiveRequest(
            number, prompt.tolist(), limit, max_draft=0 if request.drafters == frozenset() else longest, end=end,
            kind=kind, ends=ends, salt=request.salt, has_prefix=sampling.prompt_logprobs is None,
        )  # fmt: skip
        self.ones[number] = one
        self.twin.waiting.append(one)
        self.records[number] = [] if request.recorded is None else request.recorded.tolist()
        self.seen[end, kind] += 1
        self.check()

    def planned(self, plan):
        producing, scheduled, rooms, chunks = self.twin.plan()
        assert plan.rows.tolist() == [one.row for one in producing]
        assert (plan.scheduled_of_rows.tolist(), plan.rooms.tolist()) == (scheduled, rooms)
        assert [(each.sequence.row, each.scheduled, each.produces) for each in plan.chunks] == [
            (one.row, *rest) for one, *rest in chunks
        ]
        self.steps[plan] = producing, [one.admission for one in producing], chunks
        self.check()

    def launched(self, _, plan, *, is_on_graph):
        producing, _, chunks = self.steps[plan]
        if is_on_graph:
            naive.new_pages([self.clean(one) for one in producing])
        for one, count, produces in chunks:
            one.computed += count - produces
            self.twin.register(one)
        lengths = plan.draft.lengths.tolist() if is_on_graph else [entry.max_verified for entry in plan.producing]
        for one, length in zip(producing, lengths, strict=True):
            one.in_flight += 1 + length
        self.check()

    def clean(self, one):
        """A request whose pages are sent to the device, all of them after an admission."""
        one.on_device = max(one.on_device, 0)
        return one

    def launched_eager(self, step, plan):
        for one in self.ones.values():
            one.on_device = ABSENT if one.row is not None else one.on_device
        after(step, "result", lambda result: self.verified(result, plan))
        self.seen["eager"] += 1

    def verified(self, result, plan):
        """Follow `Engine._commit`, which cuts the results."""
        cuts = []
        for each in result.results:
            one, tokens = self.ones.get(each.sequence_id), each.tokens.tolist()
            if one is None or not one.admission:
                continue
            if tokens:
                one.in_flight -= 1 + each.plan.max_verified
                cuts.append((one, *self.append(one, tokens, each.plan.sources.tolist())))
            elif one.end == SCORED and one.computed == len(one.tokens):
                cuts.append((one, 0, FinishReason.LENGTH))
        for one, _, reason in cuts:
            if reason is not None:
                self.twin.stop(one)

    def append(self, one, tokens, sources):
        kept, reason = one.cut(tokens)
        one.append(tokens[:kept], len(tokens), sources)
        self.twin.register(one)
        return kept, reason

    def committed(self, report, plan, values):
        draft, ended = plan.draft, []
        for at, (one, admission) in enumerate(zip(*self.steps[plan][:2], strict=True)):
            count, verified, *tokens = values[at].tolist()
            sources = draft.sources[int(draft.offsets[at]) :][:verified].tolist()
            length = int(draft.lengths[at])
            kept, outcome = naive.commit(one, admission, tokens[:count], sources, length, (chain.END,))
            if outcome == commit.UNDECIDED:
                kept, reason = self.append(one, tokens[:count], sources)
                ended += [one] * (reason is not None)
            ended += [one] * (outcome in (commit.ENDED, commit.FULL))
            assert report.results.kept[at] == kept
            self.seen["outcome", outcome] += 1
            self.seen["in flight"] += one.in_flight > 0
        for one in ended:
            self.twin.stop(one)
        self.check()

    def registered(self, _, rows):
        by_row = {one.row: one for one in self.ones.values()}
        for row in rows.tolist():
            if row in by_row:
                self.twin.register(by_row[row])
        self.check()

    def finished(self, completion, sequence, cut):
        one = self.ones.pop(sequence.sequence_id)
        self.twin.finish(one)
        output, record = one.tokens[one.prompt :], self.records[one.number]
        assert completion.tokens.tolist() == output == [*record[: len(output)], *output[len(record) :]]
        assert (completion.steps, completion.drafted, completion.accepted) == (
            one.steps, sum(one.drafted), sum(one.accepted),
        )  # fmt: skip
        assert cut.reason is FinishReason.ABORT or one.cut([])[1] or output[-1] in one.ends
        assert self.drafter.texts.get(one.number, one.tokens) == one.tokens
        self.seen[cut.reason] += 1
        self.check()

    def check(self):
        table, twin = self.scheduler.table, self.twin
        assert [each.sequence_id for each in self.scheduler.running] == [one.number for one in twin.running]
        assert [each.sequence_id for each in self.scheduler.waiting] == [one.number for one in twin.waiting]
        rows = {one.row: one for one in self.ones.values() if one.row is not None}
        for row, sequence in enumerate(table.sequences):
            assert (sequence is None) == (row not in rows)
            if sequence is not None:
                check_row(table, rows[row], sequence.tokens)
        assert table._free == twin.free_rows
        assert self.scheduler.preemptions == twin.preemptions
        check_pool(self.scheduler.pages, twin.pool)


def test_the_table_equals_its_twin_after_each_event():
    seen = sum((Followed(seed).run() for seed in SEEDS), Counter())
    outcomes = [("outcome", outcome) for outcome in range(5)]
    events = ("preempted", "in flight", "eager", *FinishReason, *outcomes, *{each[2:] for each in SETTINGS})
    assert min(seen[event] for event in events) >= 20, seen


def lands_for_later_owners(kernel, state, rows, admissions, results, sources, offsets, lengths, *rest):
    state[rows, IN_FLIGHT] -= (state[rows, ADMISSION] != admissions) * (1 + lengths)
    kernel(state, rows, admissions, results, sources, offsets, lengths, *rest)


def forgets_drafts(kernel, state, rows, tokens, offsets, lengths, table):
    kernel(state, rows, tokens, offsets, lengths, table)
    state[rows, IN_FLIGHT] -= lengths


def sends_no_first_page(kernel, state, tables, rows, added):
    state[rows, ON_DEVICE] = np.maximum(state[rows, ON_DEVICE], 1)
    return kernel(state, tables, rows, added)


def ignores_the_watermark(kernel, *arguments):
    kernel(*arguments[:7], 0, *arguments[8:])


def plans_ended_outputs(kernel, state, *rest):
    return kernel(np.where(np.arange(state.shape[1]) == END, BY_LENGTH, state), *rest)


@pytest.mark.parametrize(
    ("module", "kernel", "bug"),
    [
        (engine.engine, "commit_results", lands_for_later_owners),
        (engine.executor.graph, "write_inputs", forgets_drafts),
        (engine.executor.graph, "new_pages", sends_no_first_page),
        (engine.scheduling.scheduler, "allocate_draft_room", ignores_the_watermark),
        (engine.scheduling.scheduler, "plan_decoding", plans_ended_outputs),
    ],
)
def test_the_twin_detects_bugs(monkeypatch, module, kernel, bug):
    original = getattr(module, kernel)
    monkeypatch.setattr(module, kernel, lambda *arguments: bug(original, *arguments))
    with pytest.raises((AssertionError, KeyError)):
        for seed in SEEDS:
            Followed(seed).run()
