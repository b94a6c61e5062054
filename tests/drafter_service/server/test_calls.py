"""Unary calls: when their messages are received, and how many at a time."""

import asyncio
from types import SimpleNamespace

import grpc
import pytest

from drafter_service.server import calls
from drafter_service.server.calls import LARGE_BYTES, MAX_LARGE_CALLS, unary_method
from drafter_service.stubs import drafter_pb2 as pb
from tests.drafter_service.guarded import run
from tests.drafter_service.server.opened_namespaces import raising

SMALL = pb.ReportRequest(namespace="n")
LARGE = pb.ReportRequest(namespace="n" * LARGE_BYTES)


class AbortError(Exception):
    """The end of a call with a status."""


async def abort(code, details):
    raise AbortError(code, details)


CONTEXT = SimpleNamespace(invocation_metadata=list, auth_context=dict, abort=abort)


async def reports(*messages):
    """Call a method, which waits for an event, with each message; return the number received before the event."""
    received, may_end, responses = [], asyncio.Event(), []

    async def method(request, _):
        await may_end.wait()
        return pb.ReportResponse(json=request.namespace)

    async def sent(message):
        received.append(message)
        yield message.SerializeToString()

    handler = unary_method(None, method, pb.ReportRequest, raising(AssertionError))
    tasks = [asyncio.create_task(handler.stream_unary(sent(message), CONTEXT)) for message in messages]
    while len(received) < min(len(messages), MAX_LARGE_CALLS):
        await asyncio.sleep(0)
    for _ in range(10 * len(messages)):
        await asyncio.sleep(0)
    before = len(received)
    may_end.set()
    responses = [pb.ReportResponse.FromString(await task).json for task in tasks]
    assert responses == [message.namespace for message in messages]
    return before


@run
async def test_few_large_messages_are_received_at_a_time():
    assert await reports(*[LARGE] * (3 * MAX_LARGE_CALLS)) == MAX_LARGE_CALLS


@run
async def test_calls_with_small_messages_are_not_limited():
    assert await reports(*[SMALL] * (3 * MAX_LARGE_CALLS)) == 3 * MAX_LARGE_CALLS


async def nothing():
    for message in ():
        yield message


async def never():
    await asyncio.Event().wait()
    yield b""


@pytest.mark.parametrize(
    ("messages", "refusal"),
    [(nothing, "the call has no message"), (never, "the message was not received within 0 s")],
)
@run
async def test_a_call_without_a_message_is_refused(monkeypatch, messages, refusal):
    monkeypatch.setattr(calls, "RECEIVE_LIMIT_S", 0.0)
    reasons = []
    handler = unary_method(None, None, pb.ReportRequest, reasons.append)
    for _ in range(2 * MAX_LARGE_CALLS):
        with pytest.raises(AbortError) as refused:
            await handler.stream_unary(messages(), CONTEXT)
        assert refused.value.args == (grpc.StatusCode.INVALID_ARGUMENT, refusal)
    assert [str(reason) for reason in reasons] == [refusal] * 2 * MAX_LARGE_CALLS
