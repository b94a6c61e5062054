"""Checks of a service: calls over a Draft stream, and what the responses must be."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc
import numpy as np

from drafter_service.auth.connector import Connector
from drafter_service.commands.conformance.checks import Check, Checks
from drafter_service.commands.conformance.raw_stream import RawGrpcStream, RawSocketStream, RawStream, StreamEndedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.wire import (
    PROTOCOL,
    WireError,
    batch_message,
    outcomes_message,
    pack,
    read_drafts,
    unpack,
)
from ssd.errors import UserError
from ssd.types import DraftBatch, Outcomes, Progress, offsets_of

CONNECT_TIMEOUT_S = 3.0
LEARNING_TIMEOUT_S = 10.0
"""Maximum time until learned text is drafted."""
POLL_S = 0.02
NO_LIMIT = (1 << 32) - 1
NO_ACCESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Codes of a handshake that say nothing about the protocol."""


class BrokenRuleError(Exception):
    """A response is not what the protocol demands."""


@dataclass
class TestedStream:
    """A stream after its handshake."""

    raw: RawStream
    welcome: pb.Welcome
    first_token: int
    """Tokens from this one on are the stream's own: no other text has them."""
    step: int = 1

    def ask(self, **fields: object) -> pb.DraftResponse:
        """Send a request, and return its response. Raises BrokenRuleError for the response to another one."""
        self.step += 1
        self.raw.send(pb.DraftRequest(step=self.step, **fields).SerializeToString())  # type: ignore[arg-type]
        response = self.raw.receive()
        require(response.step == self.step, f"request {self.step} was answered as request {response.step}")
        return response

    def accepted(self, **fields: object) -> pb.DraftResponse:
        """Return the response to a valid request."""
        response = self.ask(**fields)
        require(not response.HasField("error"), f"a valid request was refused: {response.error.message}")
        return response

    def refusal(self, what: str, **fields: object) -> None:
        """Check that an invalid request is answered with an error."""
        response = self.ask(**fields)
        require(response.HasField("error"), f"{what} is answered without an error")
        require(
            bool(response.error.message and response.error.code), f"the error for {what} has no code or no sentence"
        )

    def text(self, *tokens: int) -> np.ndarray:
        """Return tokens of this stream, uint32."""
        return np.array(tokens, np.uint32) + np.uint32(self.first_token)

    def start(self, sequence_id: int, *tokens: int, learn: bool = False, hints: tuple[int, ...] = ()) -> pb.Start:
        """Return the start of a sequence."""
        prompt, hinted = pack(self.text(*tokens), "u4"), pack(self.text(*hints), "u4")
        return pb.Start(sequence_id=sequence_id, prompt=prompt, hints=hinted, learn=learn)

    def finish(self, sequence_id: int, *tokens: int, learn: bool = False, verified: int = 0) -> pb.Finish:
        """Return the finish of a sequence."""
        data = pack(self.text(*tokens), "u4")
        return pb.Finish(sequence_id=sequence_id, tokens=data, learn=learn, verified=verified, steps=1)

    def batch(self, sequence_id: int, *tokens: int, verified: int = 0, limit: int = 3) -> pb.Batch:
        """Return the progress of a sequence."""
        return batch_message(Progress.of_one(sequence_id, self.text(*tokens), verified=verified, max_draft=limit))

    def draft(self, sequence_id: int, *tokens: int, verified: int = 0, limit: int = 3, **fields: object) -> list[int]:
        """Return the draft after progress of a sequence, counted from the stream's first token."""
        wanted = self.batch(sequence_id, *tokens, verified=verified, limit=limit)
        [draft] = drafts_of(self.accepted(batch=wanted, **fields), 1, min(limit, self.welcome.max_draft))
        return [token - self.first_token for token in draft]


def require(condition: bool, otherwise: str) -> None:
    """Raise BrokenRuleError unless a condition holds."""
    if not condition:
        raise BrokenRuleError(otherwise)


def drafts_of(response: pb.DraftResponse, count: int, limit: int) -> list[list[int]]:
    """Return the tokens of the drafts of a response. Raises BrokenRuleError for malformed ones."""
    try:
        batch = read_drafts(response.drafts, count)
    except WireError as problem:
        raise BrokenRuleError(str(problem)) from None
    for index in range(count):
        _check_draft(batch, index, limit)
    return [batch.tokens_of(index).tolist() for index in range(count)]


def _check_draft(batch: DraftBatch, index: int, limit: int) -> None:
    parents = batch.parents_of(index)
    require(len(parents) <= limit, f"a draft has {len(parents)} tokens; at most {limit} were wanted")
    ordered = (parents >= -1) & (parents < np.arange(len(parents)))
    require(bool(ordered.all()), "drafts.parents: a parent does not come before its child")
    probabilities = batch.accept_prob
    require(bool(((probabilities >= 0) & (probabilities <= 1)).all()), "drafts.accept_prob is not within 0 to 1")


# One function a check. Each has a stream of its own.


def check_welcome(stream: TestedStream) -> None:
    """Check the handshake."""
    welcome = stream.welcome
    require(welcome.protocol == PROTOCOL, f"welcome.protocol is {welcome.protocol}, not {PROTOCOL}")
    require(bool(welcome.namespace), "welcome.namespace is empty")
    require(welcome.max_draft > 0, "welcome.max_draft is 0")
    require(welcome.policy in ("suffix", "classic"), f"welcome.policy is {welcome.policy!r}")


def check_drafts(stream: TestedStream) -> None:
    """Check that a sequence's own repetition is drafted, and that progress continues it."""
    draft = stream.draft(1, starts=[stream.start(1, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2)])
    require(draft[:1] == [3], f"after 1 to 8 and 1, 2 the draft is {draft}; it should begin with 3")
    draft = stream.draft(1, 3, 4, verified=1)
    require(draft[:1] == [5], f"after 1 to 8 and 1 to 4 the draft is {draft}; it should begin with 5")
    stream.accepted(finishes=[stream.finish(1, 5)])


def check_limits(stream: TestedStream) -> None:
    """Check the maximum lengths of drafts."""
    tokens = [*range(1, 100), *range(1, 9)]
    require(
        stream.draft(1, limit=0, starts=[stream.start(1, *tokens)]) == [], "a draft has tokens although max_draft is 0"
    )
    stream.draft(1, 9, limit=1)
    stream.draft(1, 10, limit=NO_LIMIT)


def check_hints(stream: TestedStream) -> None:
    """Check that hints are drafted."""
    draft = stream.draft(1, starts=[stream.start(1, 9, 1, 2, hints=(1, 2, 3, 4))])
    require(
        draft[:1] == [3],
        f"after the hint 1, 2, 3, 4 and the prompt 9, 1, 2 the draft is {draft}; it should begin with 3",
    )


def check_order(stream: TestedStream) -> None:
    """Check that requests which are sent without waiting are answered in order."""
    stream.accepted(starts=[stream.start(1, 1, 2, 3)])
    steps = range(100, 108)
    for step in steps:
        stream.raw.send(pb.DraftRequest(step=step, batch=stream.batch(1, 4)).SerializeToString())
    answered = [stream.raw.receive().step for _ in steps]
    require(answered == [*steps], f"requests {[*steps]} were answered in the order {answered}")


def check_invalid(stream: TestedStream) -> None:
    """Check that invalid requests are answered with an error and have no effect."""
    drafted = len(stream.draft(1, starts=[stream.start(1, 1, 2, 3, 4, 1, 2)]))
    wrong = stream.batch(1, 3)
    wrong.offsets = pack(np.array([0, 7], np.uint32), "u4")
    stream.refusal("a batch whose offsets are beyond its tokens", batch=wrong)
    reserved = Progress.of_one(1, np.array([NO_LIMIT], np.uint32), max_draft=3)
    stream.refusal("the token id 4294967295", batch=batch_message(reserved))
    many = stream.batch(1, 3, verified=drafted + 1)
    stream.refusal("a batch with more verified tokens than were drafted", batch=many)
    stream.refusal("a second start of a running sequence", starts=[stream.start(1, 1)])
    stream.refusal("a second hello", hello=pb.Hello(protocol=PROTOCOL))
    draft = stream.draft(1, 3, verified=min(1, drafted))
    require(draft[:1] == [4], f"after refused requests the draft is {draft}; it should begin with 4, as without them")


def check_garbage(stream: TestedStream) -> None:
    """Check that bytes which are no message are answered with an error."""
    stream.raw.send(b"\xff\xff\xff")
    response = stream.raw.receive()
    require(response.HasField("error"), "bytes that are not a DraftRequest are answered without an error")
    stream.accepted(starts=[stream.start(1, 1)])


def check_unknown(stream: TestedStream) -> None:
    """Check that unknown sequences are reported as lost."""
    for fields in ({"batch": stream.batch(77)}, {"finishes": [stream.finish(77)]}):
        lost = unpack(stream.accepted(**fields).lost_ids, "u8", "lost_ids").tolist()
        require(lost == [77], f"a request that names the unknown sequence 77 has lost_ids {lost}")


def check_outcomes(stream: TestedStream) -> None:
    """Check drafts after possible outcomes, which change nothing."""
    drafted = stream.draft(1, starts=[stream.start(1, 1, 2, 3, 4, 5, 6, 7, 1, 2)])
    outcomes = Outcomes(
        np.array([1], np.uint64),
        offsets_of(np.array([2])),
        np.array([0, min(1, len(drafted))], np.uint32),
        stream.text(3, 4),
        np.array([2], np.uint32),
    )
    drafts_of(stream.accepted(outcomes=outcomes_message(outcomes)), 2, 2)
    again = stream.draft(1, *drafted[:1], verified=len(drafted))
    require(again[:1] == [4], f"after outcomes the draft is {again}; it should begin with 4, as without them")


def check_learning(stream: TestedStream) -> None:
    """Check that text is learned if it may be, and only then."""
    stream.accepted(starts=[stream.start(1, 11, 12), stream.start(2, 21, 22, learn=True)])
    stream.accepted(finishes=[stream.finish(1, 13, 14, learn=True), stream.finish(2, 23, 24, learn=True)])
    until = time.monotonic() + (LEARNING_TIMEOUT_S if stream.welcome.may_learn else 0)
    drafts = [[0]]
    number = 2
    while drafts[0][:1] != [23] and time.monotonic() < until:
        time.sleep(POLL_S)
        number += 1
        drafts = [stream.draft(number, starts=[stream.start(number, 21, 22)], finishes=[])]
    is_learned = drafts[0][:1] == [23]
    require(is_learned == stream.welcome.may_learn, "a finished sequence with learn is not drafted for another one")
    private = stream.draft(number + 1, starts=[stream.start(number + 1, 11, 12)])
    require(private == [], "a sequence that started without learn is drafted for another one")


def check_end(stream: TestedStream) -> None:
    """Check that a stream which the client ends has the status OK."""
    stream.accepted(starts=[stream.start(1, 1)])
    stream.raw.end()
    try:
        stream.raw.receive()
    except StreamEndedError as ended:
        require(ended.code is grpc.StatusCode.OK, str(ended))
    else:
        raise BrokenRuleError("a stream without unanswered requests has a response after its end")


Rule = Callable[[TestedStream], None]
RULES: dict[str, tuple[str, Rule]] = {
    "welcome": ("the hello is answered with a welcome", check_welcome),
    "drafts": ("a sequence's own repetitions are drafted", check_drafts),
    "limits": ("drafts are within the wanted length and max_draft", check_limits),
    "hints": ("hints are drafted", check_hints),
    "order": ("requests are answered in order", check_order),
    "invalid requests": ("invalid requests are answered with an error and have no effect", check_invalid),
    "garbage": ("bytes that are no message are answered with an error", check_garbage),
    "unknown sequences": ("unknown sequences are reported in lost_ids", check_unknown),
    "outcomes": ("possible outcomes are drafted for and change nothing", check_outcomes),
    "learning": ("text is learned if the start, the finish and the caller's rights allow it", check_learning),
    "end": ("a stream that the client ends has the status OK", check_end),
}
REFUSALS = {
    "version": (f"a hello of another protocol than {PROTOCOL} ends the stream", 99),
    "no hello": ("a first request without hello ends the stream", None),
}


@dataclass
class ServiceExam:
    """Checks of the service at one address."""

    connector: Connector
    namespace: str
    """Empty: a new one, which is deleted afterwards if the caller may do that."""
    _name: str = field(init=False)

    def __post_init__(self) -> None:
        self._name = self.namespace or f"conformance-{secrets.token_hex(4)}"

    def run(self) -> Checks:
        """Run all checks over each transport that the service has. Raises UserError if there is no access to it."""
        with self.connector.open() as channel:
            try:
                return self._run(channel)
            finally:
                if not self.namespace:
                    with suppress(grpc.RpcError):  # The caller may lack the right.
                        DrafterServiceStub(channel).DropNamespace(
                            pb.DropNamespaceRequest(namespace=self._name), metadata=self.connector.metadata()
                        )

    def _run(self, channel: grpc.Channel) -> Checks:
        transports: dict[str, Callable[[], RawStream]] = {
            "gRPC": lambda: RawGrpcStream(channel, self.connector.metadata())
        }
        if (probe := self.connector.connect_steps(CONNECT_TIMEOUT_S)) is not None:
            probe.close()
            transports["step socket"] = self._open_socket
        rules = {**RULES, **REFUSALS}
        self._check_access(transports["gRPC"])
        checks = Checks(Check(f"{each}, {name}", rules[name][0]) for each in transports for name in rules)
        for transport, open_stream in transports.items():
            for name, (_, rule) in RULES.items():
                self._run_one(checks, f"{transport}, {name}", open_stream, rule)
            for name, (_, protocol) in REFUSALS.items():
                self._check_refusal(checks, f"{transport}, {name}", open_stream, protocol)
        return checks

    def _check_access(self, open_stream: Callable[[], RawStream]) -> None:
        try:
            with suppress(BrokenRuleError), self._begun(open_stream):
                pass
        except StreamEndedError as ended:
            if ended.code in NO_ACCESS:
                raise UserError(f"the service cannot be tested: {ended.message}") from None

    def _open_socket(self) -> RawStream:
        connection = self.connector.connect_steps(CONNECT_TIMEOUT_S)
        if connection is None:
            raise StreamEndedError(grpc.StatusCode.UNAVAILABLE, "the step socket accepts no more connections")
        return RawSocketStream(connection, self.connector.authorization())

    def _run_one(self, checks: Checks, name: str, open_stream: Callable[[], RawStream], rule: Rule) -> None:
        try:
            with self._begun(open_stream) as stream:
                rule(stream)
            checks.see(name)
        except (BrokenRuleError, StreamEndedError, WireError) as problem:
            checks.fail(name, str(problem))

    @contextmanager
    def _begun(self, open_stream: Callable[[], RawStream]) -> Iterator[TestedStream]:
        raw = open_stream()
        try:
            hello = pb.Hello(protocol=PROTOCOL, client="ssd-drafter-conformance", namespace=self._name)
            raw.send(pb.DraftRequest(step=1, hello=hello).SerializeToString())
            response = raw.receive()
            require(response.HasField("welcome"), f"the hello was answered without a welcome: {response.error.message}")
            yield TestedStream(raw, response.welcome, first_token=1000 * (1 + secrets.randbelow(100_000)))
        finally:
            raw.close()

    def _check_refusal(
        self, checks: Checks, name: str, open_stream: Callable[[], RawStream], protocol: int | None
    ) -> None:
        """Check that a stream with this protocol in its hello, or without hello, ends with a sentence."""
        raw = open_stream()
        try:
            hello = None if protocol is None else pb.Hello(protocol=protocol, namespace=self._name)
            raw.send(pb.DraftRequest(step=1, hello=hello).SerializeToString())
            raw.receive()
            checks.fail(name, "the stream continues")
        except StreamEndedError as ended:
            if ended.code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT) and ended.message:
                checks.see(name)
            else:
                checks.fail(name, f"{ended}; expected is FAILED_PRECONDITION or INVALID_ARGUMENT, with a sentence")
        finally:
            raw.close()
