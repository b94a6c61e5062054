"""Request checks in front of a small application."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request

from engine.api.middleware import RequestChecks

pytestmark = pytest.mark.anyio


def client(keys=(), max_body_bytes=100):
    app = FastAPI()

    @app.post("/v1/echo")
    async def echo(request: Request):
        return len(await request.body())

    @app.get("/health")
    async def health():
        return "ok"

    app.add_middleware(RequestChecks, keys=keys, max_body_bytes=max_body_bytes)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_model_routes_need_a_key():
    async with client(["secret", "other"]) as http:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Basic secret"},
            {"Authorization": ""},
        ):
            answer = await http.post("/v1/echo", headers=headers)
            assert (answer.status_code, answer.json()["error"]["code"]) == (401, "invalid_api_key")
        for key in ("secret", "other"):
            assert (await http.post("/v1/echo", headers={"Authorization": f"Bearer {key}"})).status_code == 200
        assert (await http.get("/health")).status_code == 200


async def test_body_size_is_limited_with_and_without_content_length():
    async with client(max_body_bytes=10) as http:
        assert (await http.post("/v1/echo", content=b"x" * 10)).json() == 10
        answer = await http.post("/v1/echo", content=b"x" * 11)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"

        async def unannounced():
            for _ in range(4):
                yield b"xxx"

        assert (await http.post("/v1/echo", content=unannounced())).status_code == 413


async def test_responses_have_request_ids():
    async with client(["key"]) as http:
        given = await http.get("/health", headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        first, second = [(await http.post("/v1/echo")).headers["x-request-id"] for _ in range(2)]
        assert first != second
        invalid = await http.get("/health", headers={"X-Request-Id": "a b\tc"})
        assert invalid.headers["x-request-id"] != "a b\tc"


async def test_a_response_that_is_not_read_is_aborted():
    ended = []

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(True)

    received = []

    async def send(message):
        received.append(message)
        if len(received) > 3:
            await asyncio.Event().wait()

    scope = {"type": "http", "path": "/", "headers": []}
    await asyncio.wait_for(RequestChecks(endless, (), 10, stall_timeout_s=0.05)(scope, None, send), 30)
    assert (ended, len(received)) == ([True], 4)
