"""A service that checks the engine which uses it: every request is checked, and drafts, delays and losses are planned.

The first run of a prompt has no drafts. Later runs have drafts that are known to be right or wrong, so that the counts
of the engine can be checked: a step commits the accepted tokens of the draft that it verified, and one more."""

from __future__ import annotations

import math
from collections import abc, deque
from dataclasses import dataclass, field, replace
from enum import Enum
from functools import partial
from itertools import pairwise
from typing import NamedTuple

import grpc
import numpy as np
from google.protobuf.message import DecodeError

from drafter_service.commands.conformance.checks import RULES, Checks
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
from ssd.corpus.ring import MAX_TOKEN_ID
from ssd.types import DraftBatch, Path, Progress

ACCEPT_PROB = 0.9
"""`accept_prob` of every draft token."""
MAX_DRAFT = 4
"""Maximum number of draft tokens; small, so that short outputs take enough steps."""
EVENT_AT = 2
"""Number of batches of a sequence before the event of its scenario."""


class Scenario(Enum):
    """Plan for a sequence: its drafts or, for the last four, an event. The value is the check of what follows it."""

    NONE = ""
    """No drafts: its output is what later runs of the prompt must produce."""
    RIGHT = "drafts used"
    """The output, now and then with a wrong last token."""
    WRONG = "output"
    """Wrong tokens."""
    LATE = "late answer"
    LOST = "lost sequence"
    ERROR = "error"
    BROKEN = "broken stream"


EVENTS = (Scenario.LATE, Scenario.LOST, Scenario.ERROR, Scenario.BROKEN)


@dataclass(eq=False)
class Sequence:
    """A sequence of the engine."""

    sequence_id: int
    prompt: tuple[int, ...]
    """Hints and prompt."""
    request_id: str
    scenario: Scenario
    output: list[int] = field(default_factory=list)
    """Committed tokens."""
    draft: list[int] = field(default_factory=list)
    """The last draft."""
    had_draft: bool = False
    """Whether any of its drafts had tokens."""
    batches: int = 0
    event: str | None = None
    """Name of the check that the sequence's next tokens are about."""
    shortfall: tuple[str, str] | None = None
    """The check that fails if the last tokens were not the end of the output, and the failure."""
    is_over: bool = False
    """Whether the engine has ended the sequence while the service did not have it."""

    @property
    def label(self) -> str:
        """Name of the sequence in failures."""
        return f"sequence {self.sequence_id}"


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
        self._outputs: dict[tuple[int, ...], list[int]] = {}
        """Outputs of the first runs, which have no drafts, by prompt."""
        self._scenarios: deque[Scenario] = deque(scenario for scenario in Scenario if scenario is not Scenario.NONE)
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
            is_possible = 0 < step.seconds < math.inf and 0 <= step.drafting_s < math.inf
            is_possible &= 1 <= step.sequences <= step.tokens
            wrong = "a duration must be above 0, drafting must not be negative, and each sequence has a token"
            expect(is_possible, f"{step} is not possible: {wrong}")
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
            left = self._after(sequence.prompt, [*sequence.output, *row.tokens])
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
            self._restart(sequence, committed)
        else:
            scenario = self._assign(prompt) if not committed else Scenario.RIGHT
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
        self._check_commit(sequence, tokens.tolist(), finish.verified, max(1, finish.steps))
        self.checks.see("finishes")
        self._end(sequence)
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
        self._check_commit(sequence, row.tokens, row.verified, row.steps)
        path = self._plan_draft(sequence, row.limit, stream.vocab_size)
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

    # Rules for the text of a sequence, compared with the first run of its prompt.

    def _assign(self, prompt: tuple[int, ...]) -> Scenario:
        """Return the scenario of a sequence that starts."""
        if prompt not in self._outputs:
            return Scenario.NONE
        return self._scenarios.popleft() if self._scenarios else Scenario.RIGHT

    def _after(self, prompt: tuple[int, ...], output: list[int]) -> list[int]:
        """Return the tokens that are expected after an output; none if it is not as before."""
        expected = self._outputs.get(prompt, [])
        return expected[len(output) :] if expected[: len(output)] == output else []

    def _plan_draft(self, sequence: Sequence, limit: int, vocab_size: int) -> list[int]:
        """Return the draft that the scenario of a sequence plans; limit: its maximum length."""
        path = self._after(sequence.prompt, sequence.output)[: min(limit, MAX_DRAFT)]
        wrong = [(token + 1) % (vocab_size or MAX_TOKEN_ID) for token in path]
        if sequence.scenario is Scenario.WRONG:
            path = wrong
        elif sequence.scenario is Scenario.RIGHT and sequence.batches % 2 and len(path) > 1:
            path = [*path[:-1], wrong[-1]]
        sequence.draft = path
        sequence.had_draft |= bool(path)
        sequence.batches += 1
        return path

    def _check_commit(self, sequence: Sequence, tokens: list[int], verified: int, steps: int) -> None:
        """Check the tokens of some steps, and add them to the output."""
        check, sequence.event = sequence.event or "counts", None if tokens else sequence.event
        drafted = len(sequence.draft)
        self.checks.expect(
            check, verified <= drafted, f"{sequence.label} verified {verified} tokens of a draft of {drafted}"
        )
        if tokens:
            self._check_counts(sequence, tokens, verified, max(1, steps), check)
            sequence.output = [*sequence.output, *tokens]
            sequence.draft = []
            self._check_output(sequence, check if check == "error" else "output")

    def _restart(self, sequence: Sequence, committed: list[int]) -> None:
        """Check the tokens with which a missing sequence starts again."""
        known, check = len(sequence.output), sequence.event or "finishes"
        kept = common_length(committed, sequence.output)
        self.checks.expect(
            check,
            kept == known,
            f"{sequence.label} had {known} output tokens, and started again with {len(committed)}, of which the "
            f"first {kept} are the same; a start has all committed tokens",
        )
        sequence.output, sequence.event, sequence.is_over = committed, None, False
        self._check_output(sequence, check)
        self.checks.see(check)

    def _end(self, sequence: Sequence) -> None:
        """Keep the output of a finished sequence that had no drafts."""
        if sequence.scenario is Scenario.NONE and sequence.output:
            self._outputs.setdefault(sequence.prompt, sequence.output)
        if sequence.scenario in EVENTS:
            self._scenarios.append(sequence.scenario)  # It was too short for the event.

    def _check_counts(self, sequence: Sequence, tokens: list[int], verified: int, steps: int, check: str) -> None:
        accepted = common_length(sequence.draft[:verified], tokens)
        if sequence.shortfall is not None:
            self.checks.fail(*sequence.shortfall)
        says = (
            f"{sequence.label} committed {len(tokens)} tokens in steps={steps} with verified={verified}; its draft "
            f"agrees in {accepted} of the verified tokens, "
        )
        if self._is_overlapped:
            # Tokens may be accepted ones of other drafts as well.
            self.checks.expect(check, len(tokens) >= steps, f"{says}and a step makes one token at least")
        else:
            says += f"which makes {accepted + steps} tokens"
            self.checks.expect(check, len(tokens) <= accepted + steps, says)
            # The end of an output may be cut, at a stop token or at the maximum length.
            sequence.shortfall = (check, says) if len(tokens) < accepted + steps else None
        if accepted:
            self.checks.see("drafts used")
        if accepted or check != "counts":
            self.checks.see(check)

    def _check_output(self, sequence: Sequence, check: str) -> None:
        if sequence.had_draft:
            self.checks.see("output")
        expected, output = self._outputs.get(sequence.prompt, []), sequence.output
        index = common_length(expected, output)
        if index < min(len(expected), len(output)):
            self.checks.fail(
                check,
                f"output token {index} of {sequence.label} is {output[index]}, another one than in the run of the same "
                "prompt without drafts; run greedily, and send each committed token once",
            )


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


def common_length(one: list[int], other: list[int]) -> int:
    """Return the length of the common prefix."""
    pairs = enumerate(zip(one, other, strict=False))
    return next((index for index, (left, right) in pairs if left != right), min(len(one), len(other)))
