"""A service that checks the engine which uses it: every request is checked, and drafts, delays and losses are planned.

The first run of a prompt has no drafts. Later runs have drafts that are known to be right or wrong, so that the counts
of the engine can be checked: a step commits the accepted tokens of the draft that it verified, and one more."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial

import grpc
import numpy as np

from drafter_service.auth.callers import Context
from drafter_service.auth.listening import listen
from drafter_service.commands.conformance.checks import Check, Checks
from drafter_service.commands.conformance.sequences import (
    EVENT_AT,
    EVENTS,
    MAX_DRAFT,
    Scenario,
    Sequence,
    SequenceRules,
)
from drafter_service.server.requests import (
    FinishedSequence,
    StartedSequence,
    has_few_fields,
    read_finish,
    read_start,
)
from drafter_service.server.session import error_response
from drafter_service.server.step_socket import StepSocket
from drafter_service.server.stream import draft_method
from drafter_service.settings.tree import AccessConfig
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.address import Address
from drafter_service.transport.wire import (
    MAX_FIELDS,
    MESSAGE_SIZES,
    PROTOCOL,
    WireError,
    check_batch,
    check_engine_name,
    drafts_message,
    pack,
    read_batch,
)
from ssd.types import DraftBatch, Path, Progress

RUN_AGAIN = "run the same prompts again, greedily, with outputs of 32 tokens or more"
LOST_REPORTS = 8
"""Number of batches that may name a lost sequence, since requests may have been in flight."""


RULES = (
    Check("hello", "the first request introduces the client and its model", "no engine has connected"),
    Check("requests", "requests are well formed", "no engine has sent a batch"),
    Check("vocabulary", "token ids are below vocab_size", "no engine has sent tokens"),
    Check("starts", "sequences start once, and before batches and finishes name them", "no sequence started"),
    Check("finishes", "every sequence finishes", "no sequence finished"),
    Check("counts", "tokens, verified and steps agree in every step", RUN_AGAIN),
    Check("drafts used", "drafts are verified and accepted", RUN_AGAIN),
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


@dataclass
class Reply:
    """The answer to a request."""

    response: pb.DraftResponse | None
    """None: break the stream."""
    is_late: bool = False


@dataclass(eq=False)
class EngineStream:
    """A stream of the engine."""

    vocab_size: int | None = None
    """From the hello; None before it, 0 if the engine does not say."""
    running: dict[int, Sequence] = field(default_factory=dict)
    lost: dict[int, int] = field(default_factory=dict)
    """Number of batches that named a lost sequence, by its id."""
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
        self._missing: list[tuple[Sequence, str]] = []
        """Sequences that the engine must start again, each with the name of the check for it."""

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
        for sequence, check in self._missing:
            if not sequence.is_over:
                tokens = len(sequence.output)
                again = "finished" if check == "finishes" else "started again; if it had ended, use longer outputs"
                self.checks.fail(check, f"{sequence.label}, with {tokens} output tokens, was never {again}")
        self._missing.clear()

    def answer(self, stream: EngineStream, data: bytes) -> Reply:
        """Check a request, and return what to do."""
        request = pb.DraftRequest()
        try:
            self._parse(request, data)
            self._check_hello(stream, request)
            return self._apply(stream, request)
        except WireError as problem:
            self.checks.fail("requests", str(problem))
            return Reply(error_response(request.step, grpc.StatusCode.INVALID_ARGUMENT, str(problem)))

    def _parse(self, request: pb.DraftRequest, data: bytes) -> None:
        try:
            request.ParseFromString(data)
        except Exception:
            raise WireError("a message is not a DraftRequest of ssd.drafter.v1") from None
        if not has_few_fields(data, MAX_FIELDS):
            raise WireError(f"a request has more than {MAX_FIELDS} fields")

    def _check_hello(self, stream: EngineStream, request: pb.DraftRequest) -> None:
        hello = request.hello
        if stream.vocab_size is not None:
            if request.HasField("hello"):
                self.checks.fail("hello", "a request other than the first of a stream has a hello")
            return
        stream.vocab_size = hello.model.vocab_size
        expect = partial(self.checks.expect, "hello")
        expect(request.HasField("hello"), "the first request of a stream has no hello")
        expect(
            hello.protocol == PROTOCOL, f"hello.protocol is {hello.protocol}; this command tests protocol {PROTOCOL}"
        )
        expect(bool(hello.client), "hello.client is empty; it is the name and version of the client")
        try:
            check_engine_name(hello.engine, "hello.engine")
        except WireError as problem:
            self.checks.fail("hello", str(problem))
        self.checks.see("hello")

    def _apply(self, stream: EngineStream, request: pb.DraftRequest) -> Reply:
        starts = [read_start(message, index) for index, message in enumerate(request.starts)]
        finishes = [read_finish(message, index) for index, message in enumerate(request.finishes)]
        batch = read_batch(request.batch) if request.HasField("batch") else None
        if batch is not None:
            check_batch(batch)
        self._check_tokens(stream, [each.tokens for each in (*finishes, batch) if each is not None])
        self._check_tokens(stream, [tokens for each in starts for tokens in (each.hints, each.prompt, each.committed)])
        event = None if batch is None else self._event(stream, batch)
        if event in (Scenario.ERROR, Scenario.BROKEN):
            return self._refuse(stream, request.step, event)
        for start in starts:
            self._start(stream, start)
        lost = [each.sequence_id for each in finishes if not self._finish(stream, each)]
        paths: list[list[int]] = []
        if batch is not None:
            self.checks.see("requests")
            self._check_step_times(batch)
            paths, lost_in_batch = self._draft(stream, batch, event)
            lost += lost_in_batch
        response = pb.DraftResponse(
            step=request.step,
            drafts=drafts_message(batch_of(paths)),
            lost_ids=pack(np.array(lost, np.uint64), "u8"),
        )
        if request.HasField("hello"):
            name = request.hello.namespace or "conformance"
            response.welcome.CopyFrom(
                pb.Welcome(protocol=PROTOCOL, namespace=name, may_learn=True, max_draft=MAX_DRAFT)
            )
        return Reply(response, is_late=event is Scenario.LATE)

    # Starts and ends of sequences.

    def _start(self, stream: EngineStream, start: StartedSequence) -> None:
        label = f"sequence {start.sequence_id}"
        if start.sequence_id in stream.running:
            self.checks.fail("starts", f"{label} started while it was running")
            return
        prompt = (*start.hints.tolist(), *start.prompt.tolist())
        committed = start.committed.tolist()
        sequence = self._found(prompt, start.request_id or "")
        if sequence is None:
            scenario = self._rules.assign(prompt) if not committed else Scenario.RIGHT
            sequence = Sequence(start.sequence_id, prompt, start.request_id or "", scenario, committed)
        else:
            self._rules.restart(sequence, committed)
        sequence.sequence_id, sequence.draft = start.sequence_id, []
        stream.running[start.sequence_id] = sequence
        stream.lost.pop(start.sequence_id, None)
        self.checks.see("starts")

    def _found(self, prompt: tuple[int, ...], request_id: str) -> Sequence | None:
        """Return the missing sequence that starts again, and whose name and prompt are these."""
        for place, (sequence, _) in enumerate(self._missing):
            if (sequence.prompt, sequence.request_id) == (prompt, request_id):
                del self._missing[place]
                return sequence
        return None

    def _finish(self, stream: EngineStream, finish: FinishedSequence) -> bool:
        """End a sequence; return whether it was running."""
        sequence = stream.running.pop(finish.sequence_id, None)
        if sequence is None:
            self._unknown(stream, finish.sequence_id, is_over=True)
            return False
        self._rules.commit(sequence, finish.tokens.tolist(), finish.verified, finish.steps)
        self.checks.see("finishes")
        self._rules.end(sequence)
        return True

    def _lose(self, sequence: Sequence, check: str) -> None:
        sequence.event = check
        self._missing.append((sequence, check))

    def _unknown(self, stream: EngineStream, sequence_id: int, *, is_over: bool = False) -> None:
        """Check a request that names a sequence which is not running."""
        if sequence_id not in stream.lost:
            self.checks.fail("starts", f"a request names sequence {sequence_id}, which is not running")
            return
        stream.lost[sequence_id] += 1
        for sequence, _ in self._missing:
            sequence.is_over |= is_over and sequence.sequence_id == sequence_id
        self.checks.expect(
            "lost sequence",
            stream.lost[sequence_id] <= LOST_REPORTS,
            f"sequence {sequence_id} was reported as lost {LOST_REPORTS} times, and has not started again",
        )

    # Steps.

    def _event(self, stream: EngineStream, batch: Progress) -> Scenario | None:
        """Return the event of this batch, the planned one of its first sequence that is due."""
        for index, sequence_id in enumerate(batch.sequence_ids.tolist()):
            sequence = stream.running.get(sequence_id)
            if sequence is None or sequence.scenario not in EVENTS or sequence.batches < EVENT_AT:
                continue
            left = self._rules.after(sequence.prompt, [*sequence.output, *tokens_of(batch, index)])
            if len(left) > MAX_DRAFT and int(batch.max_draft[index]):
                event, sequence.scenario = sequence.scenario, Scenario.RIGHT
                sequence.event = None if event is Scenario.LATE else EVENTS[event]
                return event
        return None

    def _refuse(self, stream: EngineStream, step: int, event: Scenario) -> Reply:
        """Answer a batch with an error, or break the stream; the batch has no effect."""
        stream.failed = EVENTS[event]
        if event is Scenario.BROKEN:
            return Reply(None)
        return Reply(error_response(step, grpc.StatusCode.INTERNAL, "the conformance test refuses this request"))

    def _draft(
        self, stream: EngineStream, batch: Progress, event: Scenario | None
    ) -> tuple[list[list[int]], list[int]]:
        """Return the drafts of a batch, and its unknown sequences."""
        steps = [1] * len(batch.verified) if batch.steps is None else batch.steps.tolist()
        limits, verified = batch.max_draft.tolist(), batch.verified.tolist()
        paths, lost = [], []
        for index, sequence_id in enumerate(batch.sequence_ids.tolist()):
            sequence = stream.running.get(sequence_id)
            path: list[int] = []
            if sequence is None:
                self._unknown(stream, sequence_id)
                lost.append(sequence_id)
            elif sequence.event == "lost sequence":
                self._lose(stream.running.pop(sequence_id), sequence.event)
                stream.lost[sequence_id] = 0
                lost.append(sequence_id)
            else:
                self._rules.commit(sequence, tokens_of(batch, index), verified[index], steps[index])
                path = self._rules.draft(sequence, limits[index], stream.vocab_size)
                if event is Scenario.LATE and path:
                    sequence.event = EVENTS[event]
            paths.append(path)
        return paths, lost

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

    def _check_tokens(self, stream: EngineStream, runs: Iterable[np.ndarray]) -> None:
        for largest in (int(tokens.max()) for tokens in runs if len(tokens)):
            is_known = not stream.vocab_size or largest < stream.vocab_size
            self.checks.expect(
                "vocabulary", is_known, f"a request holds the token {largest}; vocab_size is {stream.vocab_size}"
            )
            self.checks.see("vocabulary")


def batch_of(paths: list[list[int]]) -> DraftBatch:
    """Return drafts."""
    return DraftBatch.from_paths(
        [Path(np.array(path, np.uint32), np.full(len(path), 0.9, np.float32)) for path in paths]
    )


def tokens_of(batch: Progress, index: int) -> list[int]:
    """Return the tokens of one sequence of a batch."""
    tokens: list[int] = batch.tokens[batch.offsets[index] : batch.offsets[index + 1]].tolist()
    return tokens


# --- Serving the checks, over gRPC and the step socket

SERVICE = pb.DESCRIPTOR.services_by_name["DrafterService"].full_name
LATE_S = 0.3
"""Delay of a late answer; longer than the deadline of an engine that waits for drafts at all."""
POLL_S = 0.05
MAX_CONNECTIONS = 64


class CheckedStreams:
    """Draft streams whose requests an `EngineChecker` answers. Used by one event loop."""

    def __init__(self, checker: EngineChecker) -> None:
        self._checker = checker
        self.last_request = asyncio.get_running_loop().time()
        """Time of the last request, by the event loop's clock."""

    @contextlib.asynccontextmanager
    async def open(self, context: Context) -> AsyncIterator[CheckedStream]:
        """See `drafter_service.server.stream.Streams`."""
        stream = CheckedStream(self, self._checker, context)
        try:
            yield stream
        finally:
            self._checker.closed(stream.checked)


class CheckedStream:
    """One stream."""

    is_sending = False

    def __init__(self, streams: CheckedStreams, checker: EngineChecker, context: Context) -> None:
        self._streams, self._checker, self._context = streams, checker, context
        self.checked = checker.opened()

    async def answer(self, data: bytes) -> bytes:
        """Check a request, and answer it as planned."""
        self._streams.last_request = asyncio.get_running_loop().time()
        reply = self._checker.answer(self.checked, data)
        if reply.response is None:
            await self._context.abort(grpc.StatusCode.UNAVAILABLE, "the conformance test breaks this stream")
        await asyncio.sleep(LATE_S if reply.is_late else 0)
        return reply.response.SerializeToString()

    def sent(self) -> None:
        """Do nothing."""


async def run_engine_checks(
    address: Address, checker: EngineChecker, idle_s: float, ready: Callable[[str], None]
) -> None:
    """Serve at an address until everything was tested, or no request has come for `idle_s` seconds.

    ready: called with the address once streams are accepted. Raises UserError for an address that cannot be used.
    """
    streams = CheckedStreams(checker)
    steps = StepSocket(streams, MAX_CONNECTIONS)
    server = grpc.aio.server(options=[*MESSAGE_SIZES, ("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(SERVICE, {"Draft": draft_method(streams)})])
    try:
        address.claim()
        if address.steps is not None:
            steps.bind(address.steps, AccessConfig().socket_permissions)
        address = listen(server, address, AccessConfig())
        await steps.start()
        await server.start()
        ready(address.text)
        while not checker.is_complete and asyncio.get_running_loop().time() < streams.last_request + idle_s:
            await asyncio.sleep(POLL_S)
    finally:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(server.stop(0), steps.stop(0))
    checker.conclude()
