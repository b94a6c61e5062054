"""What every HTTP request passes first: its id, who asks, and how long its body is."""

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

from engine.api.errors import ApiError, response_of

REQUEST_ID = "x-request-id"
USABLE_ID = re.compile(r"[\w.:-]{1,128}")

STALL_S = 60.0
"""A client that takes nothing for so long, with buffers full, is given up."""


class StalledError(Exception):
    """A client takes nothing of its answer."""


class Gate:
    """ASGI middleware. Routes below `/v1/` need one of `keys`, if there are any."""

    def __init__(self, app: ASGIApp, keys: Collection[str], max_body_bytes: int, stall_s: float = STALL_S) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._most = max_body_bytes
        self._stall_s = stall_s

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request through, or answer it with an error."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        request_id = given if USABLE_ID.fullmatch(given) else secrets.token_hex(8)

        async def named(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = request_id
            try:
                async with asyncio.timeout(self._stall_s):
                    await send(message)
            except TimeoutError:
                raise StalledError from None

        error = self._refusal(scope, headers)
        if error is not None:
            await response_of(error)(scope, receive, named)
            return
        # uvicorn closes the connection of a response that nobody takes.
        with suppress(StalledError):
            await self._app(scope, self._bounded(receive), named)

    def _refusal(self, scope: Scope, headers: Headers) -> ApiError | None:
        if scope["path"].startswith("/v1/") and self._keys and not self._is_known(headers.get("authorization", "")):
            return ApiError(401, "give a valid key, as in: Authorization: Bearer KEY", code="invalid_api_key")
        length = headers.get("content-length", "0")
        return self._too_long() if length.isdecimal() and int(length) > self._most else None

    def _is_known(self, authorization: str) -> bool:
        scheme, _, key = authorization.partition(" ")
        # Every key is compared, in constant time: how long it takes says nothing about them.
        matches = [hmac.compare_digest(key.strip().encode(), known) for known in self._keys]
        return scheme.lower() == "bearer" and any(matches)

    def _bounded(self, receive: Receive) -> Receive:
        """A body that says nothing of its length is counted as it comes."""
        taken = 0

        async def bounded() -> Message:
            nonlocal taken
            message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._most:
                raise HTTPException(413, self._too_long().message)
            return message

        return bounded

    def _too_long(self) -> ApiError:
        return ApiError(413, f"the body is longer than {self._most} bytes")
