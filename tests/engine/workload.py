"""A random workload on the chain model, with invariants checked after every step."""

from __future__ import annotations

from collections import Counter

import numpy as np

from engine.config import EngineConfig
from engine.scheduling.request import FinishReason, Request, SamplingParams
from ssd.errors import UserError
from ssd.types import Drafter
from tests.engine.chain import PAGE_SIZE, VOCAB, answer, chain_engine, contents
from tests.engine.integrity import check_integrity
from tests.engine.steps import AllTokens, each_of
from tests.engine.trees import batch_of_trees, random_tree


class StrictDrafter(Drafter):
    """Drafts right and wrong tokens, and checks the order of the engine's calls."""

    def __init__(self, rng, shape, selection=None):
        self.rng = rng
        self.shape = shape
        self.selection = selection
        self.answers = {}
        self.texts = {}
        self.offered = {}
        self.steps = Counter()
        """Number of reported steps by sequence."""
        self.most = {}
        """Largest number of draft tokens of a request, None without a limit, by sequence."""
        self.calls = Counter()
        """Number of drafts by sequence."""

    def expect(self, sequence_id, request, output):
        self.answers[sequence_id] = [*request.prompt.tolist(), *output]
        self.most[sequence_id] = 0 if request.drafters == frozenset() else request.max_draft

    def start(self, sequence_id, prompt):
        assert sequence_id not in self.texts
        self.texts[sequence_id] = prompt.tolist()
        self.offered[sequence_id] = 0

    def draft(self, progress):
        assert self.selection is None or not self.selection.is_stopped or not progress.max_draft.any()
        drafts = []
        for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
            committed = progress.tokens[progress.offsets[index] : progress.offsets[index + 1]]
            steps = 1 if progress.steps is None else int(progress.steps[index])
            self.record(sequence_id, committed, progress.verified[index], steps)
            text, limit = self.texts[sequence_id], int(progress.max_draft[index])
            assert self.most[sequence_id] != 0 or limit == 0
            self.calls[sequence_id] += 1
            right = self.answers[sequence_id][len(text) :]
            if self.shape == "tree":
                drafts.append(random_tree(self.rng, right, limit, VOCAB))
            else:
                draft = (right + [1] * limit)[: self.rng.integers(0, limit + 1)]
                draft = [t if self.rng.random() < 0.8 else int(self.rng.integers(VOCAB)) for t in draft]
                drafts.append((draft, range(-1, len(draft) - 1)))
            self.offered[sequence_id] = len(drafts[-1][0])
        return batch_of_trees(drafts)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        self.record(sequence_id, tokens, verified)
        whole = self.texts.pop(sequence_id) == self.answers[sequence_id]
        assert whole or not learn  # cancelled outputs are not learned
        # Steps of a request without drafts are reported once, at its end.
        assert self.most[sequence_id] != 0 or self.calls[sequence_id] <= 1

    def record(self, sequence_id, committed, verified, steps=1):
        # The results of a step in flight are dropped if its sequence is cancelled or preempted.
        assert verified in (0, self.offered[sequence_id])
        self.steps[sequence_id] += steps if len(committed) else 0
        text = self.texts[sequence_id]
        text += committed.tolist()
        assert text == self.answers[sequence_id][: len(text)]


class RandomBackoff(AllTokens):
    """A selection that verifies all tokens, and skips the drafter in random steps."""

    def __init__(self, rng):
        self.rng = rng
        self.is_stopped = False

    def admits(self, plan):
        plan.is_stopped = self.is_stopped
        return not self.is_stopped

    def record(self, plan, accepted, committed, seconds):
        assert not (getattr(plan, "is_stopped", False) and (plan.is_drafting or accepted))
        self.is_stopped = bool(self.rng.random() < 0.5)


def random_record(rng):
    """A recorded output without an end token, or None."""
    return rng.integers(1, VOCAB, rng.integers(0, 30)).astype(np.uint32) if rng.random() < 0.3 else None


def replayed(request):
    """The expected output of a request: its record, if any, then greedy decoding."""
    most = request.sampling.max_tokens
    recorded = [] if request.recorded is None else request.recorded.tolist()[:most]
    return recorded + answer([*request.prompt, *recorded], most - len(recorded))


class Workload:
    """Requests with shared prefixes, tenants, recorded outputs, cancellations and few pages."""

    def __init__(self, seed, shape="path", has_backoff=False, in_flight=None, wrap=lambda drafter: drafter):
        """in_flight: 0, 1, or "any", with steps of fixed shapes; None: eager steps. wrap: applied to the drafter that
        the engine gets.
        """
        self.rng = rng = np.random.default_rng(seed)
        self.seen = Counter()
        """Counts of the events that the workload must cover."""
        max_sequences, max_draft = int(rng.integers(1, 7)), int(rng.integers(0, 6))
        config = EngineConfig(
            max_sequences=max_sequences,
            max_draft=max_draft,
            max_step_tokens=max_sequences * (1 + max_draft) + int(rng.integers(0, 40)),
            watermark=float(rng.choice([0.0, 0.01, 0.2])),
            draft_shape=shape,
        )
        self.config = config
        selection = RandomBackoff(np.random.default_rng(seed)) if has_backoff else None
        self.in_flight = in_flight
        self.drafter = StrictDrafter(rng, shape, selection)
        pages = int(rng.integers(8, 41))
        self.engine = chain_engine(config, pages, wrap(self.drafter), selection, in_flight=in_flight)
        self.records = np.random.default_rng([seed, 1])
        self.choices = np.random.default_rng([seed, 2])
        self.stems = [rng.integers(1, VOCAB, 40) for _ in range(2)]
        self.requests = {}
        self.answers = {}
        self.contents = {}
        self.streamed = {}
        self.computed = {}
        """All texts up to the end of a page whose keys and values were computed, by salt."""

    def run(self, steps=60):
        for _ in range(steps):
            while self.rng.random() < 0.4:
                self.arrive()
            if self.rng.random() < 0.15 and self.requests:
                preempted = [s.sequence_id for s in self.engine.scheduler.waiting if s.preemptions]
                self.cancel(int(self.rng.choice(preempted or list(self.requests)[-8:])))
            self.step()
        while self.engine.scheduler.has_work:
            self.step()
        pages = self.engine.scheduler.pages
        assert pages.free_count == pages.count
        assert not self.drafter.texts
        self.seen["preempted"] += self.engine.scheduler.preemptions

    def arrive(self):
        rng = self.rng
        stem = self.stems[rng.integers(2)][: rng.integers(0, 41)]
        prompt = np.concatenate([stem, rng.integers(1, VOCAB, rng.integers(1, 9))]).astype(np.uint32)
        sampling = SamplingParams(max_tokens=int(rng.integers(1, 30)))
        recorded = random_record(self.records)
        salt = str(rng.choice(["", "tenant"], p=[0.8, 0.2]))
        if self.choices.random() < 0.1:
            sampling, recorded = SamplingParams(max_tokens=0, prompt_logprobs=0), None
        request = Request(prompt, sampling, **self.choose_drafting(), salt=salt, recorded=recorded)
        room = self.engine.window.tokens - len(prompt)
        try:
            sequence_id = self.engine.add(request)
        except UserError:
            assert room < min(1, sampling.max_tokens)
            self.seen["refused"] += 1
            return
        self.requests[sequence_id] = request
        self.answers[sequence_id] = replayed(request)[:room]
        self.seen["scored"] += sampling.max_tokens == 0
        self.seen["recorded"] += 0 if recorded is None else len(recorded)
        self.contents[sequence_id] = contents([*prompt, *self.answers[sequence_id]])
        self.streamed[sequence_id] = []
        self.drafter.expect(sequence_id, request, self.answers[sequence_id])
        self.seen["not drafted"] += not request.is_drafted

    def choose_drafting(self):
        """Return fields of a request: a fifth choose no drafter, a fifth their own longest draft."""
        choice = self.choices.random()
        own = int(self.choices.integers(self.config.max_draft + 1))
        return {"drafters": frozenset() if choice < 0.2 else None, "max_draft": own if choice > 0.8 else None}

    def cancel(self, sequence_id):
        scheduler = self.engine.scheduler
        sequence = scheduler.find(sequence_id)
        completion = self.engine.cancel(sequence_id)
        check_integrity(scheduler)
        assert scheduler.find(sequence_id) is None
        assert (completion is None) == (sequence is None)
        if sequence is None or completion is None:
            self.seen["cancelled too late"] += 1
            return
        assert completion.finish_reason is FinishReason.ABORT
        assert completion.tokens.tolist() == self.streamed[sequence_id]
        self.seen["cancelled after preemption" if sequence.preemptions else "cancelled"] += 1

    def step(self):
        scheduler = self.engine.scheduler
        alive = [*scheduler.running, *scheduler.waiting]
        before = {each: (each.computed, len(each), each.in_flight, each.preemptions) for each in alive}
        # With a step in flight, a sequence may start with this step, which is reported later.
        is_ahead = bool(self.engine._in_flight)
        decoding = [
            s for s in scheduler.running if s.room and s.computed == len(s) - 1 and (s.in_flight or not is_ahead)
        ]
        # Tokens of a step in flight were counted when it was launched.
        launched = {
            *self.in_flight_tokens(),
            *(s for step in self.engine._in_flight for s in scheduler.table.of(step.plan.prompts.all_rows)),
        }
        report = self.engine.step()
        check_integrity(scheduler)
        assert self.engine._speculation.drafter.failures.count == 0
        self.check_in_flight()
        self.check_output(report)
        self.check_progress([one for one in alive[:1] if one not in launched], decoding, before, report)
        if self.in_flight is not None:
            # Two steps may have been planned, the second one with pages that the first one filled.
            for sequence in alive:
                self.record_computed(sequence)
        for sequence in alive:
            self.check_cache(sequence)
        for sequence in alive:
            self.record_computed(sequence)

    def in_flight_tokens(self):
        """Running sequences of the step in flight, and the largest number of tokens that it may append to each."""
        table, found = self.engine.scheduler.table, {}
        for step in self.engine._in_flight:
            plan = step.plan
            is_running = plan.still_runs[: plan.producers]
            lengths = plan.lengths[is_running].tolist()
            for sequence, length in zip(table.of(plan.rows[is_running]), lengths, strict=True):
                found[sequence] = 1 + length
        return found

    def check_in_flight(self):
        """Check that `Sequence.in_flight` is the largest number of tokens that the step in flight may append."""
        assert len(self.engine._in_flight) <= (0 if self.in_flight is None else 1)
        begun = self.in_flight_tokens()
        for sequence in (*self.engine.scheduler.running, *self.engine.scheduler.waiting):
            assert sequence.in_flight in (0, begun.get(sequence, 0))
            assert sequence.in_flight or sequence not in begun or sequence.preemptions
            self.seen["in flight"] += sequence.in_flight

    def check_output(self, report):
        assert report.committed == sum(map(len, report.tokens.values()))
        for result in each_of(report.result):
            most = self.drafter.most[result.sequence_id]
            assert most is None or result.drafted <= most
        for sequence_id, tokens in report.tokens.items():
            assert len(tokens)
            self.streamed[sequence_id] += tokens.tolist()
            assert self.streamed[sequence_id] == self.answers[sequence_id][: len(self.streamed[sequence_id])]
        for sequence_id, completion in report.finished.items():
            assert completion.tokens.tolist() == self.streamed[sequence_id] == self.answers[sequence_id]
            assert self.drafter.steps[sequence_id] == completion.steps
            self.seen["finished"] += 1
            self.seen["accepted"] += completion.accepted
            self.seen["rejected"] += completion.drafted - completion.accepted

    def check_progress(self, oldest, decoding, before, report):
        """Check that the oldest sequence advances, and that decoding ones get a token unless they are preempted."""
        for sequence in oldest:
            if sequence.in_flight == 0 or before[sequence][2]:
                assert (sequence.computed, len(sequence)) > before[sequence][:2]
        for sequence in decoding:
            assert sequence.sequence_id in report.tokens or sequence.preemptions > before[sequence][3]

    def check_cache(self, sequence):
        """Check the cache entries of a running sequence, and that reused pages were computed before."""
        held = self.engine._executor.runner.held(sequence.pages, sequence.computed) if len(sequence.pages) else []
        assert held == self.contents[sequence.sequence_id][: len(held)]
        cached = sequence.cached_tokens
        assert cached < len(sequence.request.prompt)
        if cached:
            assert tuple(sequence.tokens[:cached].tolist()) in self.computed.get(sequence.request.salt, ())
            self.seen["cached"] += 1

    def record_computed(self, sequence):
        texts = self.computed.setdefault(sequence.request.salt, set())
        for end in range(PAGE_SIZE, sequence.computed + 1, PAGE_SIZE):
            texts.add(tuple(sequence.tokens[:end].tolist()))
