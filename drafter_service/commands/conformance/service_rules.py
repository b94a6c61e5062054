"""Rules for a service: calls over a Draft stream, and what the responses must be."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import grpc
import numpy as np

from drafter_service.commands.conformance.raw_stream import RawStream, StreamEndedError
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import (
    PROTOCOL,
    WireError,
    batch_message,
    pack,
    read_drafts,
    unpack,
)
from ssd.types import Progress, StepTime

LEARNING_TIMEOUT_S = 10.0
"""Maximum time until learned text is drafted."""
POLL_S = 0.02
NO_LIMIT = (1 << 32) - 1
PERIOD = (1, 2, 3, 4) * 8
"""A text with long drafts."""
IMPOSSIBLE = [
    *(StepTime(4, 1, seconds) for seconds in (0.0, -1.0, math.nan, math.inf)),
    StepTime(0, 0, 1.0),
    StepTime(1, 9, 1.0),
]
"""Durations that a service must ignore."""


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

    def batch(
        self,
        sequence_id: int,
        *tokens: int,
        verified: int = 0,
        limit: int = 3,
        step_times: Sequence[StepTime] = (),
    ) -> pb.Batch:
        """Return the progress of a sequence."""
        progress = Progress.of_one(sequence_id, self.text(*tokens), verified=verified, max_draft=limit)
        return batch_message(replace(progress, step_times=step_times))

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
        batch, malformed = read_drafts(response.drafts, np.full(count, limit, np.uint32))
    except WireError as problem:
        raise BrokenRuleError(str(problem)) from None
    require(
        not malformed,
        f"a draft has more than {limit} tokens, a parent not before its child, or an accept_prob outside 0 to 1",
    )
    return [batch.tokens_of(index).tolist() for index in range(count)]


# One function a check. Each has a stream of its own.


def check_welcome(stream: TestedStream) -> None:
    """Check the handshake."""
    welcome = stream.welcome
    require(welcome.protocol == PROTOCOL, f"welcome.protocol is {welcome.protocol}, not {PROTOCOL}")
    require(bool(welcome.namespace), "welcome.namespace is empty")
    require(welcome.max_draft > 0, "welcome.max_draft is 0")


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


def check_step_times(stream: TestedStream) -> None:
    """Check that durations of steps are accepted, that impossible ones change nothing, and that malformed ones do not
    count.
    """
    before = stream.draft(1, limit=16, starts=[stream.start(1, *PERIOD)])
    stream.accepted(batch=stream.batch(1, limit=0, step_times=IMPOSSIBLE))
    after = stream.draft(2, limit=16, starts=[stream.start(2, *PERIOD)])
    require(after == before, f"after impossible durations of steps a draft is {after}; before, it was {before}")
    possible = stream.batch(1, step_times=[StepTime(4, 1, 0.01, 0.001)])
    stream.accepted(batch=possible)
    possible.step_seconds = possible.step_seconds[:4]
    stream.refusal("a batch with fewer step_seconds than step_tokens", batch=possible)


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
    "step times": ("durations of steps are accepted, and impossible ones are ignored", check_step_times),
    "garbage": ("bytes that are no message are answered with an error", check_garbage),
    "unknown sequences": ("unknown sequences are reported in lost_ids", check_unknown),
    "learning": ("text is learned if the start, the finish and the caller's rights allow it", check_learning),
    "end": ("a stream that the client ends has the status OK", check_end),
}
REFUSALS: dict[str, tuple[str, pb.Hello | None]] = {
    "version": (f"a hello of another protocol than {PROTOCOL} ends the stream", pb.Hello(protocol=99)),
    "engine name": ("an invalid name of an engine ends the stream", pb.Hello(protocol=PROTOCOL, engine="a b")),
    "no hello": ("a first request without hello ends the stream", None),
}
