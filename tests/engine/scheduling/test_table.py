"""The table of running requests, its kernels and the engine's use of them equal slow twins, event by event."""

from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.executor.shapes import GREEDY
from engine.sampling.grammar import Grammar
from engine.scheduling import commit, planning, table
from engine.scheduling.pages import PagePool
from engine.scheduling.request import FinishReason, Request, SamplingParams
from engine.scheduling.sequence import UNLIMITED, Sequence
from engine.scheduling.table import ADMISSION, BY_END_TOKENS, BY_LENGTH, BY_REQUEST, IN_FLIGHT, ON_DEVICE, TEXT
from ssd.types import offsets_of
from tests.engine import chain
from tests.engine.chain import PAGE_SIZE, VOCAB, chain_engine
from tests.engine.scheduling import naive_table as naive
from tests.engine.test_core import ScriptedDrafter
from tests.engine.workload import RandomBackoff, random_record

SEEDS = range(36)
SETTINGS = [
    ({}, {}, BY_END_TOKENS, 0),
    ({"ignore_eos": True}, {}, BY_LENGTH, 0),
    ({"temperature": 1.0}, {"max_draft": 0}, BY_END_TOKENS, table.SAMPLED),
    ({"temperature": 1.0, "top_k": 3}, {}, BY_END_TOKENS, table.SAMPLED | table.TRUNCATES),
    ({"stop_token_ids": (5,)}, {}, BY_REQUEST, 0),
    ({"temperature": 1.0, "verification": "rejection"}, {}, BY_END_TOKENS, table.SAMPLED | table.NEEDS_HOST),
    ({"logprobs": 0}, {}, BY_REQUEST, table.NEEDS_HOST),
]
"""Settings of requests, and their values of END and KIND."""


def test_scored_requests_and_grammars_need_the_host():
    grammar = SamplingParams(grammar=Grammar("json_object"))
    for sampling, *expected in (
        (SamplingParams(max_tokens=0, prompt_logprobs=0), table.SCORED, table.NEEDS_HOST),
        (grammar, BY_REQUEST, table.HAS_GRAMMAR | table.NEEDS_HOST),
    ):
        state = Sequence(0, Request(np.ones(1, np.uint32), sampling), 9).state
        assert state[[table.END, table.KIND]].tolist() == expected


def check(requests, pages, twins, twin_pages, texts):
    """Compare rows of a table and their texts with requests, and a pool of pages with its twin."""
    for one in twins:
        assert [*requests.state[one.row, :TEXT], *requests.state[one.row, TEXT + 1 :]] == one.columns()
        assert texts[one.row][: len(one.tokens)].tolist() == one.tokens
        assert requests.pages[one.row, : len(one.pages)].tolist() == one.pages
    assert pages.arrays.unused[: pages.arrays.counts[0]].tolist() == twin_pages.unused
    assert pages._idle() == twin_pages.idle
    assert np.flatnonzero(pages.arrays.owners).tolist() == sorted(page for one in twins for page in one.pages)


def random_rows(rng):
    """A table with a random state in each row, its pages, their twins, and the texts of the rows."""
    requests, pages, twin_pages = table.RequestTable(5, 20), PagePool(20, PAGE_SIZE), naive.NaivePages(20)
    pages.register(pages.allocate(4), np.arange(8, dtype=np.uint64).reshape(4, 2))
    pages.free(np.arange(4, dtype=np.int32))
    twin_pages.named = dict(enumerate(twin_pages.take(4)))
    twin_pages.free(list(range(4)))
    texts, twins = [], []
    for row, state in enumerate(requests.state):
        length, limit = (1 + np.sort(rng.choice(32, 2, replace=False))).tolist()
        tokens, most = rng.integers(0, VOCAB, length).tolist(), int(rng.choice([0, 2, UNLIMITED]))
        one = naive.NaiveRequest(row + 10, tokens, limit, most, int(rng.integers(4)), 0)
        one.row, one.computed = row, int(length - 1 if rng.random() < 0.7 else rng.integers(length))
        one.in_flight, one.admission = rng.integers(1, 5, 2).tolist() if rng.random() < 0.5 else (0, 1)
        one.pages = twin_pages.take(min(-(-one.computed // PAGE_SIZE), twin_pages.free_count))
        one.on_device = int(rng.integers(len(one.pages) + 1))
        requests.pages[row, : len(one.pages)] = pages.allocate(len(one.pages))
        texts.append(np.resize(np.array(tokens, np.uint32), limit))
        state[:TEXT], state[TEXT + 1 :], state[TEXT] = one.number, one.columns()[1:], texts[-1].ctypes.data
        twins.append(one)
    return requests, pages, twins, twin_pages, texts


def test_each_kernel_equals_its_twin():
    seen = Counter()
    for seed in range(200):
        rng = np.random.default_rng(seed)
        requests, pages, twins, twin_pages, texts = everything = random_rows(rng)
        check(*everything)
        state, order = requests.state, [twins[row] for row in rng.permutation(len(twins))]
        rows = np.array([one.row for one in order])

        decoding, others, ahead = *np.empty((2, len(rows)), np.int64), int(rng.integers(3))
        found = planning.plan_decoding(
            state, requests.pages, pages.arrays, rows, PAGE_SIZE, ahead, decoding, others
        )
        planned = naive.plan_decoding(order, twin_pages, PAGE_SIZE, ahead)
        if found[0] == planning.LACKING:
            assert found[1] == planned
        else:
            written = decoding[: found[0]].tolist(), others[: found[1]].tolist()
            assert written == tuple([one.row for one in part] for part in planned)
        seen[found[0] == planning.LACKING] += 1
        check(*everything)

        scheduled, rooms = rng.integers(1, 4, len(rows)), np.empty(len(rows), np.int64)
        settings = [PAGE_SIZE, *rng.integers((1, 0, 0, 0), (7, 9, 2, 4)).tolist()]
        planning.allocate_draft_room(state, requests.pages, pages.arrays, rows, scheduled, *settings, rooms)
        assert rooms.tolist() == naive.allocate_draft_room(order, scheduled.tolist(), twin_pages, *settings)
        check(*everything)

        offsets = offsets_of(rng.integers(0, 4, len(rows)))
        tokens = rng.integers(0, VOCAB, offsets[-1]).astype(np.uint32)
        sources = rng.choice([0, 3, 13, 14, 255], offsets[-1]).astype(np.uint8)
        lengths = rng.integers(0, np.diff(offsets.astype(np.int64)) + 1)
        inputs, added = np.zeros((len(rows), 5), np.int32), np.empty((3, 90), np.int32)
        commit.write_inputs(state, rows, tokens, offsets, lengths, inputs)
        for one, first, length, line in zip(order, offsets.tolist(), lengths.tolist(), inputs.tolist(), strict=False):
            one.in_flight += 1 + length
            assert line == [one.row, 1 + length, *tokens[first : first + length], *[0] * (3 - length)]
        count = commit.new_pages(state, requests.pages, rows, added)
        assert added[:, :count].T.tolist() == naive.new_pages(order)
        check(*everything)

        verified = rng.integers(0, lengths + 1)
        produced = np.minimum(rng.integers(1, verified + 2), [one.limit - len(one.tokens) for one in order])
        results = np.column_stack((produced, verified, rng.integers(0, VOCAB, (len(rows), 4)))).astype(np.int32)
        admissions, ends = state[rows, ADMISSION] + (rng.random(len(rows)) < 0.2), np.array([2, 5], np.uint32)
        kept, outcomes = np.empty((2, len(rows)), np.int64)
        commit.commit_results(state, rows, admissions, results, sources, offsets, lengths, ends, kept, outcomes)
        for at, one in enumerate(order):
            new, known = results[at, 2 : 2 + produced[at]].tolist(), sources[int(offsets[at]) :][: verified[at]].tolist()
            expected = naive.commit(one, admissions[at], new, known, int(lengths[at]), (2, 5))
            assert (kept[at], outcomes[at]) == expected
            seen["outcome", expected[1]] += 1
        check(*everything)

        starts = np.array([rng.integers(len(one.tokens) + 1) for one in order])
        parts = [one.tokens[start:] for one, start in zip(order, starts, strict=True)]
        copied = np.zeros(sum(map(len, parts)), np.uint32)
        commit.copy_tokens(state[rows, TEXT] + 4 * starts, offsets_of(np.array([len(each) for each in parts])), copied)
        assert copied.tolist() == sum(parts, [])
    assert len(seen) == 7 and min(seen.values()) > 10, seen


class RandomDevice:
    """Replaces the steps of fixed shapes: accepts random numbers of draft tokens and produces random tokens."""

    def __init__(self, rng, requests):
        self.rng, self.requests, self.state, self.slots = rng, requests, self, {}
        self.greedy, self.kind_of = GREEDY, lambda *_: GREEDY

    def install(self, slots, sequences):
        for slot, one in zip(slots, sequences, strict=True):
            text = [*one.tokens.tolist(), *one.recorded_rest.tolist()]
            self.slots[slot] = SimpleNamespace(length=len(one), limit=one.max_length, text=text, pages={})

    def add_pages(self, added):
        for slot, place, page in added.T.tolist():
            self.slots[slot].pages[place] = page

    def run(self, inputs, _):
        results = self.rng.integers(0, VOCAB, (len(inputs.table), inputs.table.shape[1] + 1)).astype(np.int32)
        for line, (slot, rows, *_), context in zip(results, inputs.table.tolist(), inputs.contexts, strict=True):
            one, held = self.slots[slot], self.requests.sequences[slot].pages
            assert [one.pages[place] for place in range(len(held))] == held
            assert len(held) * PAGE_SIZE >= min(context + rows, one.limit) >= one.length
            verified = int(self.rng.integers(rows))
            line[:2] = min(int(self.rng.integers(1, verified + 2)), one.limit - one.length), verified
            recorded = one.text[one.length :][: line[0]]
            line[2 : 2 + len(recorded)] = recorded
            one.length += line[0]
        return SimpleNamespace(read=lambda: results)


class Followed:
    """An engine with random results, and a twin that is compared with it after each event."""

    def __init__(self, seed):
        self.rng, self.seen, self.ones, self.steps = np.random.default_rng(seed), Counter(), {}, {}
        most, draft, pages, extra = self.rng.integers((1, 0, 6, 0), (6, 5, 25, 30)).tolist()
        watermark, has_cache = (0.0, 0.1)[seed % 2], seed % 4 > 0
        config = EngineConfig(
            max_sequences=most, max_draft=draft, max_step_tokens=most * (1 + draft) + extra, page_size=PAGE_SIZE,
            prefix_cache=has_cache, watermark=watermark,
        )  # fmt: skip
        drafter = ScriptedDrafter(lambda *_: self.rng.integers(0, VOCAB, self.rng.integers(0, 6)))
        selection = RandomBackoff(self.rng) if seed % 3 else None
        self.engine = engine = chain_engine(config, pages, drafter, selection, in_flight="any")
        self.scheduler, self.twin = engine.scheduler, naive.NaiveScheduler(config, pages)
        engine._graph.grid = RandomDevice(self.rng, self.scheduler.table)
        engine._executor_for = lambda _: engine._graph  # The twin has no eager steps.
        for owner, name in (
            (self.scheduler, "plan"), (self.scheduler, "register_rows"), (engine, "_count_launched"),
            (engine, "_commit_rows"), (engine, "_finish"),
        ):  # fmt: skip
            self.follow(owner, name)

    def follow(self, owner, name):
        """Call the twin's method after each call of the engine's, and compare."""
        original, act = getattr(owner, name), getattr(self, name.strip("_"))

        def call(*arguments, **options):
            result = original(*arguments, **options)
            act(result, *arguments)
            self.check()
            return result

        setattr(owner, name, call)

    def run(self):
        for _ in range(50):
            while self.rng.random() < 0.45:
                self.arrive()
            if self.rng.random() < 0.1 and self.ones:
                self.engine.cancel(int(self.rng.choice(list(self.ones))))
            self.engine.step()
        while self.engine.has_work:
            self.engine.step()
        assert (self.twin.pool.free_count, len(self.ones)) == (self.scheduler.pages.count, 0)
        self.seen["preempted"] += self.twin.preemptions
        return self.seen

    def arrive(self):
        sampling, fields, end, kind = SETTINGS[self.rng.integers(len(SETTINGS))]
        sampling = SamplingParams(**{"max_tokens": int(self.rng.integers(1, 12)), **sampling})
        prompt = self.rng.integers(0, VOCAB, self.rng.integers(1, 13)).astype(np.uint32)
        salt, record = str(self.engine._next_id), random_record(self.rng)
        request = Request(prompt, sampling, salt=salt, recorded=record, **fields)
        number = self.engine.add(request)
        ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (chain.END,))}
        limit, most = self.engine.check(request), fields.get("max_draft", UNLIMITED)
        self.ones[number] = one = naive.NaiveRequest(number, prompt.tolist(), limit, most, end, kind, ends)
        one.record = [] if record is None else record.tolist()
        self.twin.waiting.append(one)
        self.seen[end, kind] += 1

    def plan(self, plan):
        producing, rooms, chunks = self.twin.plan()
        assert (plan.rows.tolist(), plan.rooms.tolist()) == ([one.row for one in producing], rooms)
        planned = [(each.sequence.row, each.scheduled, each.produces) for each in plan.chunks]
        assert planned == [(one.row, *rest) for one, *rest in chunks]
        self.steps[plan] = [(one, one.admission) for one in producing], chunks

    def count_launched(self, _, plan):
        producing, chunks = self.steps[plan]
        for (one, _), length in zip(producing, plan.draft.lengths.tolist(), strict=True):
            one.in_flight += 1 + length
            one.on_device = len(one.pages)
        for one, count, produces in chunks:
            one.computed += count - produces
            self.twin.register(one)

    def commit_rows(self, report, plan, values):
        draft, ended = plan.draft, []
        for at, (one, admission) in enumerate(self.steps[plan][0]):
            count, verified, *tokens = values[at].tolist()
            sources, length = draft.sources[int(draft.offsets[at]) :][:verified].tolist(), int(draft.lengths[at])
            kept, outcome = naive.commit(one, admission, tokens[:count], sources, length, (chain.END,))
            is_ended = outcome in (commit.ENDED, commit.FULL)
            if outcome == commit.UNDECIDED:
                kept, is_ended = one.cut(tokens[:count])
                one.append(tokens[:kept], count, sources)
                self.twin.register(one)
            ended += [one] * is_ended
            assert report.results.kept[at] == kept
            self.seen["outcome", outcome] += 1
            self.seen["in flight"] += one.in_flight > 0
        for one in ended:
            self.twin.stop(one)

    def register_rows(self, _, rows):
        for one in [one for row in rows.tolist() for one in self.ones.values() if one.row == row]:
            self.twin.register(one)

    def finish(self, completion, sequence, cut):
        one = self.ones.pop(sequence.sequence_id)
        self.twin.finish(one)
        output = one.tokens[one.prompt :]
        assert completion.tokens.tolist() == output == [*one.record[: len(output)], *output[len(one.record) :]]
        counts = completion.steps, completion.drafted, completion.accepted
        assert counts == (one.steps, sum(one.drafted), sum(one.accepted))
        self.seen[cut.reason] += 1

    def check(self):
        scheduler, twin = self.scheduler, self.twin
        for sequences, ones in ((scheduler.running, twin.running), (scheduler.waiting, twin.waiting)):
            assert [each.sequence_id for each in sequences] == [one.number for one in ones]
        held = [one for one in self.ones.values() if one.row is not None]
        texts = {row: each.tokens for row, each in enumerate(scheduler.table.sequences) if each is not None}
        assert texts.keys() == {one.row for one in held}
        assert (scheduler.table._free, scheduler.preemptions) == (twin.free_rows, twin.preemptions)
        check(scheduler.table, scheduler.pages, held, twin.pool, texts)


def test_the_table_equals_its_twin_after_each_event():
    seen = sum((Followed(seed).run() for seed in SEEDS), Counter())
    outcomes = [("outcome", outcome) for outcome in range(5)]
    events = ("preempted", "in flight", *FinishReason, *outcomes, *{each[2:] for each in SETTINGS})
    assert min(seen[event] for event in events) >= 20, seen


def lands_for_later_owners(kernel, state, rows, admissions, *rest):
    state[rows, IN_FLIGHT] -= state[rows, ADMISSION] != admissions
    kernel(state, rows, admissions, *rest)


def forgets_drafts(kernel, state, rows, tokens, offsets, lengths, inputs):
    kernel(state, rows, tokens, offsets, lengths, inputs)
    state[rows, IN_FLIGHT] -= lengths


def sends_no_first_page(kernel, state, tables, rows, added):
    state[rows, ON_DEVICE] = np.maximum(state[rows, ON_DEVICE], 1)
    return kernel(state, tables, rows, added)


def ignores_the_watermark(kernel, *arguments):
    kernel(*arguments[:7], 0, *arguments[8:])


@pytest.mark.parametrize(
    ("kernel", "bug"),
    [
        ("engine.engine.commit_results", lands_for_later_owners),
        ("engine.executor.graph.write_inputs", forgets_drafts),
        ("engine.executor.graph.new_pages", sends_no_first_page),
        ("engine.scheduling.scheduler.allocate_draft_room", ignores_the_watermark),
    ],
)
def test_the_twin_detects_bugs(monkeypatch, kernel, bug):
    module, name = kernel.rsplit(".", 1)
    original = getattr(__import__(module, fromlist=[name]), name)
    monkeypatch.setattr(kernel, lambda *arguments: bug(original, *arguments))
    with pytest.raises((AssertionError, KeyError)):
        for seed in SEEDS:
            Followed(seed).run()
