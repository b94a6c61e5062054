"""What every request passes first, over a small application of its own."""

import asyncio

import httpx
import pytest
from fastapi import FastAPI, Request

from engine.api.gate import Gate

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def client(keys=(), most=100):
    app = FastAPI()

    @app.post("/v1/echo")
    async def echo(request: Request):
        return len(await request.body())

    @app.get("/health")
    async def health():
        return "ok"

    app.add_middleware(Gate, keys=keys, max_body_bytes=most)
    return httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test")


async def test_routes_of_the_model_need_a_key():
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


async def test_bodies_have_a_bound_whether_they_say_their_length_or_not():
    async with client(most=10) as http:
        assert (await http.post("/v1/echo", content=b"x" * 10)).json() == 10
        answer = await http.post("/v1/echo", content=b"x" * 11)
        assert answer.status_code == 413
        assert answer.json()["error"]["type"] == "invalid_request_error"

        async def unannounced():
            for _ in range(4):
                yield b"xxx"

        assert (await http.post("/v1/echo", content=unannounced())).status_code == 413


async def test_requests_have_ids():
    async with client(["key"]) as http:
        given = await http.get("/health", headers={"X-Request-Id": "mine-1"})
        assert given.headers["x-request-id"] == "mine-1"
        first, second = [(await http.post("/v1/echo")).headers["x-request-id"] for _ in range(2)]
        assert first != second
        strange = await http.get("/health", headers={"X-Request-Id": "a b\tc"})
        assert strange.headers["x-request-id"] != "a b\tc"


async def test_a_client_that_takes_nothing_is_given_up():
    ended = []

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": b"x", "more_body": True})
        finally:
            ended.append(True)

    taken = []

    async def send(message):
        taken.append(message)
        if len(taken) > 3:
            await asyncio.Event().wait()

    scope = {"type": "http", "path": "/", "headers": []}
    await asyncio.wait_for(Gate(endless, (), 10, stall_s=0.05)(scope, None, send), 30)
    assert (ended, len(taken)) == ([True], 4)
