"""Middleware for all routes: request ids, API keys, body size limits, and timeouts for stalled clients."""

from __future__ import annotations

import asyncio
import hmac
import re
import secrets
from collections.abc import Collection
from contextlib import suppress

from starlette.datastructures import Headers, MutableHeaders
from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.api.errors import ApiError, error_response

REQUEST_ID = "x-request-id"
VALID_ID = re.compile(r"[\w.:-]{1,128}")

STALL_TIMEOUT_S = 60.0
"""Time after which a response is aborted if its buffers are full and the client reads nothing."""


BODY_TIMEOUT_S = 30.0
"""Time after which a request whose body has not arrived completely is answered with status 408."""


class StalledError(Exception):
    """Raised when the client has stopped reading its response."""


class RequestChecks:
    """ASGI middleware. Routes below `/v1/` require one of `keys`, if there are any."""

    def __init__(
        self,
        app: ASGIApp,
        keys: Collection[str],
        max_body_bytes: int,
        stall_timeout_s: float = STALL_TIMEOUT_S,
        body_timeout_s: float = BODY_TIMEOUT_S,
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._max_body_bytes = max_body_bytes
        self._stall_timeout_s = stall_timeout_s
        self._body_timeout_s = body_timeout_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, or reject it with an error response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if VALID_ID.fullmatch(given) else secrets.token_hex(8)

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            try:
                async with asyncio.timeout(self._stall_timeout_s):
                    await send(message)
            except TimeoutError:
                raise StalledError from None

        error = self._check(scope, headers)
        if error is not None:
            if "expect" not in headers:  # Otherwise the client waits for the response before it sends the body.
                await self._discard_body(scope, receive)
            await error_response(error)(scope, receive, send_with_id)
            return
        # uvicorn closes the connection of an unfinished response.
        with suppress(StalledError):
            await self._app(scope, self._limited(scope, receive), send_with_id)

    def _check(self, scope: Scope, headers: Headers) -> ApiError | None:
        """Return an error for a request without a valid key or with a too large Content-Length, otherwise None."""
        if scope["path"].startswith("/v1/") and self._keys and not self._has_key(headers.get("authorization", "")):
            return ApiError(401, "give a valid key, as in: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "0")
        return self._too_long() if length.isdecimal() and int(length) > self._max_body_bytes else None

    def _has_key(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Compare with every key in constant time, so that timing reveals nothing about the keys.
        matches = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    async def _discard_body(self, scope: Scope, receive: Receive) -> None:
        """Read the rest of a refused body if the connection closes after the response.

        A client that sends the whole body before it reads would not get the response from a connection that is reset.
        """
        if scope.get("http_version") != "1.0" and "close" not in Headers(scope=scope).get("connection", "").lower():
            return  # uvicorn discards it after the response.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._body_timeout_s):
                while (await receive()).get("more_body", False):
                    pass

    def _limited(self, scope: Scope, receive: Receive) -> Receive:
        """Enforce the limits on size, since requests may lack a Content-Length, and time while reading the body."""
        received, is_complete = 0, False
        until = asyncio.get_running_loop().time() + self._body_timeout_s

        async def limited() -> Message:
            nonlocal received, is_complete
            try:
                # After the body comes the end of the connection, at any time.
                async with asyncio.timeout_at(None if is_complete else until):
                    message = await receive()
            except TimeoutError:
                detail = f"the body was not received completely within {self._body_timeout_s:g} s"
                raise HTTPException(408, detail) from None
            is_complete = not message.get("more_body", False)
            received += len(message.get("body", b""))
            if received > self._max_body_bytes:
                if not is_complete:
                    await self._discard_body(scope, receive)
                raise HTTPException(413, self._too_long().message)
            return message

        return limited

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._max_body_bytes} bytes; send a shorter prompt")
