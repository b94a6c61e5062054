"""Checks of a service, over each of its transports: requests over a Draft stream, and what the responses must be."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from functools import partial

import grpc
import numpy as np

from drafter_service.auth.connector import Connector
from drafter_service.client.streams import StreamError
from drafter_service.commands.conformance.checks import Check, Checks
from drafter_service.commands.conformance.simulated_engine import (
    Call,
    RawStream,
    SocketCall,
    finish,
    grpc_call,
    packed,
    start,
)
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.address import system_error
from drafter_service.transport.wire import PROTOCOL, WireError, batch_message, pack, read_drafts, unpack
from ssd.errors import UserError
from ssd.types import Progress, StepTime

CONNECT_TIMEOUT_S = 3.0
LEARNING_TIMEOUT_S = 10.0
"""Maximum time until learned text is drafted."""
POLL_S = 0.02
NO_ACCESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Codes of a handshake that say nothing about the protocol."""
REFUSED = (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT)
ACCESS = "gRPC, welcome"
"""Name of the first check. Without access to the service it fails with a code of `NO_ACCESS`."""
NO_LIMIT = (1 << 32) - 1
GARBAGE = b"\xff\xff\xff"
PERIOD = (1, 2, 3, 4) * 8
"""A text with long drafts."""
IMPOSSIBLE = [
    *(StepTime(4, 1, seconds) for seconds in (0.0, -1.0, math.nan, math.inf)),
    StepTime(0, 0, 1.0),
    StepTime(1, 9, 1.0),
]
"""Durations that a service must ignore."""


# --- Rules


class BrokenRuleError(Exception):
    """A response is not what the protocol demands."""


def require(condition: bool, otherwise: str) -> None:
    """Raise BrokenRuleError unless a condition holds."""
    if not condition:
        raise BrokenRuleError(otherwise)


@dataclass
class TestedStream:
    """A stream after its handshake."""

    raw: RawStream
    open_call: Call
    """Opens another stream."""
    welcome: pb.Welcome
    first_token: int
    """Tokens from this one on are the stream's own: no other text has them."""
    step: int = 1

    def exchange(self, **fields: object) -> pb.DraftResponse:
        """Send a request, and return its response. Raises BrokenRuleError for the response to another one."""
        self.step += 1
        self.raw.send(pb.DraftRequest(step=self.step, **fields).SerializeToString())  # type: ignore[arg-type]
        response = self.raw.receive()
        require(response.step == self.step, f"request {self.step} was answered as request {response.step}")
        return response

    def accepted(self, **fields: object) -> pb.DraftResponse:
        """Return the response to a valid request."""
        response = self.exchange(**fields)
        require(not response.HasField("error"), f"a valid request was refused: {response.error.message}")
        return response

    def refusal(self, what: str, **fields: object) -> None:
        """Check that an invalid request is answered with an error."""
        response = self.exchange(**fields)
        require(response.HasField("error"), f"{what} is answered without an error")
        require(bool(response.error.message and response.error.code), f"the error for {what} has no code or no message")

    def text(self, tokens: Iterable[int]) -> np.ndarray:
        """Return tokens of this stream, uint32."""
        return np.fromiter(tokens, np.uint32) + np.uint32(self.first_token)

    def start(self, sequence_id: int, *tokens: int, learn: bool = False, hints: Sequence[int] = ()) -> pb.Start:
        """Return the start of a sequence."""
        return start(sequence_id, self.text(tokens), learn=learn, hints=packed(self.text(hints)))

    def finish(self, sequence_id: int, *tokens: int, learn: bool = False) -> pb.Finish:
        """Return the finish of a sequence."""
        return finish(sequence_id, self.text(tokens), learn=learn, steps=1)

    def batch(
        self, sequence_id: int, *tokens: int, verified: int = 0, limit: int = 3, step_times: Sequence[StepTime] = ()
    ) -> pb.Batch:
        """Return the progress of a sequence."""
        progress = Progress.of_one(sequence_id, self.text(tokens), verified=verified, max_draft=limit)
        return batch_message(replace(progress, step_times=step_times))

    def draft(self, sequence_id: int, *tokens: int, verified: int = 0, limit: int = 3, **fields: object) -> list[int]:
        """Return the draft after progress of a sequence, counted from the stream's first token.

        Raises BrokenRuleError for a malformed one.
        """
        wanted = self.batch(sequence_id, *tokens, verified=verified, limit=limit)
        most = min(limit, self.welcome.max_draft)
        draft, malformed = read_drafts(self.accepted(batch=wanted, **fields).drafts, np.array([most], np.uint32))
        require(
            not malformed,
            f"a draft has more than {most} tokens, a parent not before its child, or an accept_prob outside 0 to 1",
        )
        return [token - self.first_token for token in draft.tokens.tolist()]

    def require_draft(self, first: int, draft: list[int], when: str) -> None:
        """Check that a draft begins with a token."""
        require(draft[:1] == [first], f"{when} the draft is {draft}; it should begin with {first}")


Rule = Callable[[TestedStream], None]
RULES: dict[str, Rule] = {}
"""Functions that check a rule on a stream of their own, by the rule's name; their docstring is the rule."""


def _rule(check: Rule) -> Rule:
    RULES[check.__name__.strip("_").replace("_", " ")] = check
    return check


@_rule
def _welcome(stream: TestedStream) -> None:
    """the hello is answered with a welcome"""
    welcome = stream.welcome
    require(welcome.protocol == PROTOCOL, f"welcome.protocol is {welcome.protocol}, not {PROTOCOL}")
    require(bool(welcome.namespace), "welcome.namespace is empty")
    require(welcome.max_draft > 0, "welcome.max_draft is 0")


@_rule
def _drafts(stream: TestedStream) -> None:
    """a sequence's own repetitions are drafted"""
    draft = stream.draft(1, starts=[stream.start(1, 1, 2, 3, 4, 5, 6, 7, 8, 1, 2)])
    stream.require_draft(3, draft, "after 1 to 8 and 1, 2")
    stream.require_draft(5, stream.draft(1, 3, 4, verified=1), "after 1 to 8 and 1 to 4")
    stream.accepted(finishes=[stream.finish(1, 5)])


@_rule
def _limits(stream: TestedStream) -> None:
    """drafts are within the wanted length and max_draft"""
    start = stream.start(1, *range(1, 100), *range(1, 9))
    require(stream.draft(1, limit=0, starts=[start]) == [], "a draft has tokens although max_draft is 0")
    stream.draft(1, 9, limit=1)
    stream.draft(1, 10, limit=NO_LIMIT)


@_rule
def _hints(stream: TestedStream) -> None:
    """hints are drafted"""
    draft = stream.draft(1, starts=[stream.start(1, 9, 1, 2, hints=(1, 2, 3, 4))])
    stream.require_draft(3, draft, "after the hint 1, 2, 3, 4 and the prompt 9, 1, 2")


@_rule
def _order(stream: TestedStream) -> None:
    """requests are answered in order"""
    stream.accepted(starts=[stream.start(1, 1, 2, 3)])
    steps = range(100, 108)
    for step in steps:
        stream.raw.send(pb.DraftRequest(step=step, batch=stream.batch(1, 4)).SerializeToString())
    answered = [stream.raw.receive().step for _ in steps]
    require(answered == [*steps], f"requests {[*steps]} were answered in the order {answered}")


@_rule
def _invalid_requests(stream: TestedStream) -> None:
    """invalid requests are answered with an error and have no effect"""
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
    stream.require_draft(4, stream.draft(1, 3, verified=min(1, drafted)), "after refused requests, as without them,")


@_rule
def _step_times(stream: TestedStream) -> None:
    """durations of steps are accepted, and impossible ones are ignored"""
    before = stream.draft(1, limit=16, starts=[stream.start(1, *PERIOD)])
    stream.accepted(batch=stream.batch(1, limit=0, step_times=IMPOSSIBLE))
    after = stream.draft(2, limit=16, starts=[stream.start(2, *PERIOD)])
    require(after == before, f"after impossible durations of steps a draft is {after}; before, it was {before}")
    possible = stream.batch(1, step_times=[StepTime(4, 1, 0.01, 0.001)])
    stream.accepted(batch=possible)
    possible.step_seconds = possible.step_seconds[:4]
    stream.refusal("a batch with fewer step_seconds than step_tokens", batch=possible)


@_rule
def _garbage(stream: TestedStream) -> None:
    """bytes that are no message are answered with an error"""
    stream.raw.send(GARBAGE)
    response = stream.raw.receive()
    require(response.HasField("error"), "bytes that are not a DraftRequest are answered without an error")
    stream.accepted(starts=[stream.start(1, 1)])


@_rule
def _unknown_sequences(stream: TestedStream) -> None:
    """unknown sequences are reported in lost_ids"""
    for fields in ({"batch": stream.batch(77)}, {"finishes": [stream.finish(77)]}):
        lost = unpack(stream.accepted(**fields).lost_ids, "u8", "lost_ids").tolist()
        require(lost == [77], f"a request that names the unknown sequence 77 has lost_ids {lost}")


@_rule
def _learning(stream: TestedStream) -> None:
    """text is learned if the start, the finish and the caller's rights allow it"""
    stream.accepted(starts=[stream.start(1, 11, 12), stream.start(2, 21, 22, learn=True)])
    stream.accepted(finishes=[stream.finish(1, 13, 14, learn=True), stream.finish(2, 23, 24, learn=True)])
    until = time.monotonic() + (LEARNING_TIMEOUT_S if stream.welcome.may_learn else 0)
    number, draft = 3, [0]
    while draft[:1] != [23] and time.monotonic() < until:
        time.sleep(POLL_S)
        draft = stream.draft(number, starts=[stream.start(number, 21, 22)])
        number += 1
    is_learned = draft[:1] == [23]
    require(is_learned == stream.welcome.may_learn, "a finished sequence with learn is not drafted for another one")
    private = stream.draft(number, starts=[stream.start(number, 11, 12)])
    require(private == [], "a sequence that started without learn is drafted for another one")


@_rule
def _end(stream: TestedStream) -> None:
    """a stream that the client ends has the status OK"""
    stream.accepted(starts=[stream.start(1, 1)])
    stream.raw.end()
    ended = end_of(stream.raw)
    require(ended.code() is grpc.StatusCode.OK, f"the stream ended with {described(ended)}")


@_rule
def _refused_hello(stream: TestedStream) -> None:
    """a hello of another protocol, or of an invalid engine name, and a first request without hello end the stream"""
    for hello in (pb.Hello(protocol=99), pb.Hello(protocol=PROTOCOL, engine="a b"), None):
        if hello is not None:
            hello.namespace = stream.welcome.namespace
        with closing(RawStream(stream.open_call)) as raw:
            raw.send(pb.DraftRequest(step=1, hello=hello).SerializeToString())
            ended = end_of(raw)
            expected = f"{described(ended)}; expected is FAILED_PRECONDITION or INVALID_ARGUMENT, with a message"
            require(ended.code() in REFUSED and bool(ended.details()), f"the stream ended with {expected}")


def end_of(stream: RawStream) -> grpc.RpcError:
    """Return the end of a stream. Raises BrokenRuleError for a response."""
    try:
        stream.receive()
    except grpc.RpcError as ended:
        return ended
    raise BrokenRuleError("a stream that must end is answered")


def described(ended: grpc.RpcError) -> str:
    """Return the status of a stream as a text."""
    return f"{ended.code().name}: {ended.details()}"


# --- A run of all checks


def check_service(connector: Connector, namespace: str = "") -> Checks:
    """Run all checks over each transport that a service has. Raises UserError if there is no access to it.

    namespace: for the texts of the checks. Empty: a new one, which is deleted afterwards if the caller may do that.
    """
    name = namespace or f"conformance-{secrets.token_hex(4)}"
    with connector.open() as channel:
        transports: dict[str, Call] = {"gRPC": grpc_call(channel, connector.metadata())}
        if (probe := connector.connect_steps(CONNECT_TIMEOUT_S)) is not None:
            probe.close()
            transports["step socket"] = partial(_open_socket, connector)
        checks = Checks(Check(f"{each}, {rule}", str(RULES[rule].__doc__)) for each in transports for rule in RULES)
        try:
            for transport, open_call in transports.items():
                for rule in RULES:
                    _check(checks, f"{transport}, {rule}", RULES[rule], open_call, name)
        finally:
            if not namespace:
                with suppress(grpc.RpcError):  # The caller may lack the right.
                    request = pb.DropNamespaceRequest(namespace=name)
                    DrafterServiceStub(channel).DropNamespace(request, metadata=connector.metadata())
    return checks


def _open_socket(connector: Connector, requests: Iterator[bytes]) -> SocketCall:
    connection = connector.connect_steps(CONNECT_TIMEOUT_S)
    if connection is None:
        raise StreamError(grpc.StatusCode.UNAVAILABLE, "the step socket accepts no more connections")
    return SocketCall(connection, connector.authorization(), requests)


def _check(checks: Checks, name: str, rule: Rule, open_call: Call, namespace: str) -> None:
    """Check a rule on a stream of its own, and record the outcome. Raises UserError without access to the service."""
    try:
        with closing(RawStream(open_call)) as raw:
            hello = pb.Hello(protocol=PROTOCOL, client="ssd-drafter-conformance", namespace=namespace)
            raw.send(pb.DraftRequest(step=1, hello=hello).SerializeToString())
            response = raw.receive()
            require(response.HasField("welcome"), f"the hello was answered without a welcome: {response.error.message}")
            rule(TestedStream(raw, open_call, response.welcome, first_token=1000 * (1 + secrets.randbelow(100_000))))
        checks.see(name)
    except (BrokenRuleError, WireError) as problem:
        checks.fail(name, str(problem))
    except grpc.RpcError as ended:
        if name == ACCESS and ended.code() in NO_ACCESS:
            reason = str(ended.details())
            reason = system_error(reason) if ended.code() is grpc.StatusCode.UNAVAILABLE else reason
            raise UserError(f"the service cannot be tested: {reason}") from None
        checks.fail(name, f"the stream ended with {described(ended)}")
