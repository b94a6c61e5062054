"""A service that checks the engine which uses it: every request is checked, and drafts, delays and losses are planned.

The first run of a prompt has no drafts. Later runs have drafts that are known to be right or wrong, so that the counts
of the engine can be checked: a step commits the accepted tokens of the draft that it verified, and one more."""

from __future__ import annotations

import math
from collections import abc
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from drafter_service.commands.conformance.checks import Check, Checks
from drafter_service.commands.conformance.sequences import (
    EVENT_AT,
    EVENTS,
    MAX_DRAFT,
    Scenario,
    Sequence,
    SequenceRules,
)
from drafter_service.server.requests import StartedSequence, read_finish, read_start
from drafter_service.server.session import error_response
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    PROTOCOL,
    WireError,
    check_batch,
    check_engine_name,
    drafts_message,
    pack,
    read_batch,
)
from ssd.types import DraftBatch, Path, Progress

ACCEPT_PROB = 0.9
"""`accept_prob` of every draft token."""
RUN_AGAIN = "run the same prompts again, greedily, with outputs of 32 tokens or more"

RULES = (
    Check("hello", "the first request introduces the client and its model", "no engine has connected"),
    Check("requests", "requests are well formed, with token ids below vocab_size", "no engine has sent a batch"),
    Check("starts", "sequences start once, and before batches and finishes name them", "no sequence started"),
    Check("finishes", "every sequence finishes", "no sequence finished"),
    Check("counts", "tokens, verified and steps agree in every step", RUN_AGAIN),
    Check("drafts used", "drafts are verified and accepted", f"no draft token was accepted; {RUN_AGAIN}"),
    Check(
        "step times",
        "durations of steps are possible, and agree with the tokens of the batch",
        "the engine sends no step_seconds, so the service cannot learn how much to draft for it",
        is_optional=True,
    ),
    Check("output", "drafts do not change the output", RUN_AGAIN),
    Check("late answer", "the draft of a late answer does not count as verified", RUN_AGAIN),
    Check("lost sequence", "a lost sequence starts again with all of its tokens", RUN_AGAIN),
    Check("error", "tokens of a request that was answered with an error are sent again", RUN_AGAIN),
    Check("broken stream", "after a broken stream, sequences start again with all of their tokens", RUN_AGAIN),
)
"""The checks of an engine's side."""


class Row(NamedTuple):
    """Progress of one sequence of a batch."""

    sequence_id: int
    tokens: list[int]
    """Tokens committed since its last draft."""
    verified: int
    steps: int
    limit: int
    """Maximum length of its next draft."""


@dataclass(eq=False)
class EngineStream:
    """A stream of the engine."""

    has_begun: bool = False
    """Whether its first request has come."""
    vocab_size: int = 0
    """From the hello; 0 if the engine does not say."""
    running: dict[int, Sequence] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)
    """Ids of sequences that were lost and have not started again."""
    is_late: bool = False
    """Whether the response to the last request is sent late."""
    failed: str = ""
    """Name of the check that the end of the stream is about; empty: this side has not caused it."""


class EngineChecker:
    """Answers the requests of an engine, and checks them."""

    def __init__(self, *, is_overlapped: bool = False) -> None:
        """is_overlapped: whether the engine requests drafts while a step is in flight."""
        self.checks = Checks(map(replace, RULES))
        self._is_overlapped = is_overlapped
        self._rules = SequenceRules(self.checks, is_overlapped=is_overlapped)
        self._streams: set[EngineStream] = set()
        self._missing: list[Sequence] = []
        """Sequences that the engine must start again."""

    @property
    def is_settled(self) -> bool:
        """Whether everything was tested and no sequence has to start again."""
        return self.checks.are_seen and not self._missing

    @property
    def is_complete(self) -> bool:
        """Whether everything was tested and the engine is done."""
        return self.is_settled and not self._streams

    def opened(self) -> EngineStream:
        """Begin a stream."""
        stream = EngineStream()
        self._streams.add(stream)
        return stream

    def closed(self, stream: EngineStream) -> None:
        """End a stream, from either side."""
        self._streams.discard(stream)
        for sequence in stream.running.values():
            self._lose(sequence, stream.failed or "finishes")

    def conclude(self) -> None:
        """Check that nothing is left."""
        for stream in list(self._streams):
            self.closed(stream)
        for sequence in self._missing:
            if not sequence.is_over:
                check, tokens = sequence.event, len(sequence.output)
                again = "finished" if check == "finishes" else "started again; if it had ended, use longer outputs"
                self.checks.fail(str(check), f"{sequence.label}, with {tokens} output tokens, was never {again}")
        self._missing.clear()

    def reply(self, stream: EngineStream, data: bytes) -> pb.DraftResponse | None:
        """Check a request, and return the response; None to break the stream. It is late if `stream.is_late`."""
        request = pb.DraftRequest()
        try:
            request.ParseFromString(data)
            self._check_hello(stream, request)
            vocab_size = stream.vocab_size
            starts = [read_start(message, index, vocab_size) for index, message in enumerate(request.starts)]
            ends = [read_finish(message, index, vocab_size) for index, message in enumerate(request.finishes)]
            batch = read_batch(request.batch, vocab_size) if request.HasField("batch") else None
            rows = [] if batch is None else rows_of(batch)
            event = self._event(stream, rows)
            stream.is_late = event is Scenario.LATE
            if event in (Scenario.ERROR, Scenario.BROKEN):
                stream.failed = event.value
                refusal = "the conformance test refuses this request"
                error = error_response(request.step, grpc.StatusCode.INTERNAL, refusal)
                return error if event is Scenario.ERROR else None
            # The order that the protocol defines.
            for start in starts:
                self.start(stream, start)
            finishes = zip(request.finishes, ends, strict=True)
            lost = [each.sequence_id for each, tokens in finishes if not self.finish(stream, each, tokens)]
            paths = [self.draft(stream, row) for row in rows]
            lost += [row.sequence_id for row, path in zip(rows, paths, strict=True) if path is None]
            if batch is not None:
                self.checks.see("requests")
                self._check_step_times(batch)
            return pb.DraftResponse(
                step=request.step,
                welcome=self.welcome(request.hello) if request.HasField("hello") else None,
                drafts=drafts_message(batch_of([path or [] for path in paths])),
                lost_ids=pack(np.array(lost, np.uint64), "u8"),
            )
        except (WireError, DecodeError) as problem:
            self.checks.fail("requests", str(problem))
            return error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, str(problem))

    def _check_hello(self, stream: EngineStream, request: pb.DraftRequest) -> None:
        hello = request.hello
        expect = partial(self.checks.expect, "hello")
        if stream.has_begun:
            expect(not request.HasField("hello"), "a request other than the first of a stream has a hello")
            return
        stream.has_begun, stream.vocab_size = True, hello.model.vocab_size
        expect(request.HasField("hello"), "the first request of a stream has no hello")
        wanted = f"hello.protocol is {hello.protocol}; this command tests protocol {PROTOCOL}"
        expect(hello.protocol == PROTOCOL, wanted)
        expect(bool(hello.client), "hello.client is empty; it is the name and version of the client")
        self.checks.see("hello")
        check_engine_name(hello.engine, "hello.engine")

    def _check_step_times(self, batch: Progress) -> None:
        """Check the durations of the steps that ran, and that a single one had the tokens that the batch is about."""
        expect = partial(self.checks.expect, "step times")
        for step in batch.step_times:
            self.checks.see("step times")
            expect(
                0 < step.seconds < math.inf and 0 <= step.drafting_s < math.inf,
                f"a step took {step.seconds} seconds, and drafting delayed it by {step.drafting_s}; these must be "
                "finite, and the first must not be 0",
            )
            expect(
                1 <= step.sequences <= step.tokens,
                f"a step ran {step.tokens} tokens of {step.sequences} sequences; each has at least one",
            )
        is_one_step = batch.steps is None or int(batch.steps.max(initial=1)) <= 1
        if batch.step_times and is_one_step and not self._is_overlapped:
            least = int(np.count_nonzero(np.diff(batch.offsets))) + int(batch.verified.sum())
            last = batch.step_times[-1].tokens
            expect(
                last >= least,
                f"the last step ran {last} tokens; the sequences of its batch had {least}, verified draft tokens "
                "included",
            )

    # Planned events.

    def _event(self, stream: EngineStream, rows: list[Row]) -> Scenario | None:
        """Return the event of this batch, the planned one of its first sequence that is due."""
        for row in rows:
            sequence = stream.running.get(row.sequence_id)
            if sequence is None or sequence.scenario not in EVENTS or sequence.batches < EVENT_AT:
                continue
            left = self._rules.after(sequence.prompt, [*sequence.output, *row.tokens])
            if len(left) > MAX_DRAFT and row.limit:
                event, sequence.scenario = sequence.scenario, Scenario.RIGHT
                if event is not Scenario.LATE:
                    sequence.event = event.value
                return event
        return None

    # Parts of a response, which tests replace.

    def welcome(self, hello: pb.Hello) -> pb.Welcome:
        """Return the answer to a hello."""
        name = hello.namespace or "conformance"
        return pb.Welcome(protocol=PROTOCOL, namespace=name, may_learn=True, max_draft=MAX_DRAFT)

    def start(self, stream: EngineStream, start: StartedSequence) -> None:
        """Start a sequence, which may be one that must start again."""
        sequence_id, request_id = start.message.sequence_id, start.message.request_id
        if sequence_id in stream.running:
            self.checks.fail("starts", f"sequence {sequence_id} started while it was running")
            return
        hints, text, committed = (start.texts[name].tolist() for name in ("hints", "prompt", "committed"))
        prompt = (*hints, *text)
        missing = [each for each in self._missing if (each.prompt, each.request_id) == (prompt, request_id)]
        if missing:
            sequence = missing[0]
            self._missing.remove(sequence)
            self._rules.restart(sequence, committed)
        else:
            scenario = self._rules.assign(prompt) if not committed else Scenario.RIGHT
            sequence = Sequence(sequence_id, prompt, request_id, scenario, committed)
        sequence.sequence_id, sequence.draft = sequence_id, []
        stream.running[sequence_id] = sequence
        stream.lost.discard(sequence_id)
        self.checks.see("starts")

    def finish(self, stream: EngineStream, finish: pb.Finish, tokens: np.ndarray) -> bool:
        """End a sequence; return whether it was running."""
        sequence = stream.running.pop(finish.sequence_id, None)
        if sequence is None:
            self._check_lost(stream, finish.sequence_id)
            for missing in self._missing:
                missing.is_over |= missing.sequence_id == finish.sequence_id
            return False
        self._rules.commit(sequence, tokens.tolist(), finish.verified, max(1, finish.steps))
        self.checks.see("finishes")
        self._rules.end(sequence)
        return True

    def draft(self, stream: EngineStream, row: Row) -> list[int] | None:
        """Return the planned draft of a sequence; None if it is lost."""
        sequence = stream.running.get(row.sequence_id)
        if sequence is None:
            self._check_lost(stream, row.sequence_id)
            return None
        if sequence.event == Scenario.LOST.value:
            self._lose(stream.running.pop(row.sequence_id), sequence.event)
            stream.lost.add(row.sequence_id)
            return None
        self._rules.commit(sequence, row.tokens, row.verified, row.steps)
        path = self._rules.draft(sequence, row.limit, stream.vocab_size)
        if stream.is_late and path:
            sequence.event = Scenario.LATE.value
        return path

    def _lose(self, sequence: Sequence, check: str) -> None:
        sequence.event = check
        self._missing.append(sequence)

    def _check_lost(self, stream: EngineStream, sequence_id: int) -> None:
        """Check that a sequence which a request names, and which is not running, was lost."""
        wrong = f"a request names sequence {sequence_id}, which is not running"
        self.checks.expect("starts", sequence_id in stream.lost, wrong)


def rows_of(batch: Progress) -> list[Row]:
    """Return the sequences of a batch. Raises WireError if its arrays do not fit together."""
    check_batch(batch)
    steps = np.ones_like(batch.verified) if batch.steps is None else batch.steps
    runs = [batch.tokens[first:end].tolist() for first, end in pairwise(batch.offsets.tolist())]
    columns = (array.tolist() for array in (batch.verified, steps, batch.max_draft))
    return [*map(Row, batch.sequence_ids.tolist(), runs, *columns)]


def batch_of(paths: abc.Sequence[abc.Sequence[int]]) -> DraftBatch:
    """Return drafts."""
    return DraftBatch.from_paths(
        [Path(np.array(path, np.uint32), np.full(len(path), ACCEPT_PROB, np.float32)) for path in paths]
    )
