"""Checks of a service, over each of its transports."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import grpc

from drafter_service.auth.connector import Connector
from drafter_service.commands.conformance.checks import Check, Checks
from drafter_service.commands.conformance.raw_stream import RawGrpcStream, RawSocketStream, RawStream, StreamEndedError
from drafter_service.commands.conformance.service_rules import (
    REFUSALS,
    RULES,
    BrokenRuleError,
    Rule,
    TestedStream,
    require,
)
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs.drafter_pb2_grpc import DrafterServiceStub
from drafter_service.transport.address import system_error
from drafter_service.transport.wire import PROTOCOL, WireError
from ssd.errors import UserError

CONNECT_TIMEOUT_S = 3.0
NO_ACCESS = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED)
"""Codes of a handshake that say nothing about the protocol."""


@dataclass
class ServiceChecker:
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
            for name, (_, hello) in REFUSALS.items():
                self._check_refusal(checks, f"{transport}, {name}", open_stream, hello)
        return checks

    def _check_access(self, open_stream: Callable[[], RawStream]) -> None:
        try:
            with suppress(BrokenRuleError), self._begun(open_stream):
                pass
        except StreamEndedError as ended:
            if ended.code in NO_ACCESS:
                reason = system_error(ended.message) if ended.code is grpc.StatusCode.UNAVAILABLE else ended.message
                raise UserError(f"the service cannot be tested: {reason}") from None

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
        self, checks: Checks, name: str, open_stream: Callable[[], RawStream], hello: pb.Hello | None
    ) -> None:
        """Check that a stream with this hello, or without one, ends with an error message."""
        raw = open_stream()
        try:
            request = pb.DraftRequest(step=1, hello=hello)
            if hello is not None:
                request.hello.namespace = self._name
            raw.send(request.SerializeToString())
            raw.receive()
            checks.fail(name, "the stream continues")
        except StreamEndedError as ended:
            if ended.code in (grpc.StatusCode.FAILED_PRECONDITION, grpc.StatusCode.INVALID_ARGUMENT) and ended.message:
                checks.see(name)
            else:
                checks.fail(name, f"{ended}; expected is FAILED_PRECONDITION or INVALID_ARGUMENT, with a message")
        finally:
            raw.close()
