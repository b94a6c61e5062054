"""Request checks in front of a small application."""

import asyncio
import socket
from contextlib import closing, contextmanager
from http.client import HTTPConnection
from threading import Thread

import httpx
import pytest
import uvicorn
from fastapi import FastAPI, Request

from engine.api.app import add_error_handlers
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


@contextmanager
def listening(app):
    """Serve an application from another thread; yield its port."""
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning", lifespan="off"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = Thread(target=server.run, kwargs={"sockets": [listener]})
        thread.start()
        try:
            yield listener.getsockname()[1]
        finally:
            server.should_exit = True
            thread.join()


def test_a_body_that_does_not_arrive_is_answered_and_the_connection_closed():
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/v1/echo")
    async def echo(body: dict):
        return body

    head = b"POST /v1/echo HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: 9\r\n\r\n"
    with listening(RequestChecks(app, (), 100, body_timeout_s=0.2)) as port:
        with socket.create_connection(("127.0.0.1", port), 30) as half:
            half.sendall(head + b'{"a":')
            answer = b"".join(iter(lambda: half.recv(4096), b""))
        assert answer.startswith(b"HTTP/1.1 408 ")
        assert b"the body was not received completely within 0.2 s" in answer
        with socket.create_connection(("127.0.0.1", port), 30) as whole:
            whole.sendall(head.replace(b"Host", b"Connection: close\r\nHost") + b'{"a": 12}')  # In one packet.
            answer = b"".join(iter(lambda: whole.recv(4096), b""))
        assert answer.endswith(b'{"a":12}')


@pytest.mark.parametrize("is_announced", [True, False], ids=["length", "chunked"])
@pytest.mark.parametrize("connection", ["close", "keep-alive"])
def test_a_client_that_sends_a_long_body_before_it_reads_gets_the_response(is_announced, connection):
    app = FastAPI()
    add_error_handlers(app)

    @app.post("/v1/echo")
    async def echo(request: Request):
        return len(await request.body())

    body = b"x" * (16 << 20)  # More than the buffers of a connection hold.
    sent = body if is_announced else (body[at : at + (1 << 20)] for at in range(0, len(body), 1 << 20))
    with listening(RequestChecks(app, (), 100)) as port, closing(HTTPConnection("127.0.0.1", port, timeout=30)) as http:
        http.request("POST", "/v1/echo", sent, {"Connection": connection})
        answer = http.getresponse()
        assert (answer.status, b"the body is longer than 100 bytes" in answer.read()) == (413, True)


async def test_a_complete_body_may_be_followed_by_a_long_response():
    async def app(scope, receive, send):
        assert (await receive())["more_body"] is False
        ended.append(await receive())

    async def receive():
        if not ended:
            ended.append("body")
            return {"type": "http.request", "body": b"x", "more_body": False}
        await asyncio.sleep(0.1)
        return {"type": "http.disconnect"}

    ended = []
    scope = {"type": "http", "path": "/", "headers": []}
    await RequestChecks(app, (), 10, body_timeout_s=0.01)(scope, receive, None)
    assert ended == ["body", {"type": "http.disconnect"}]
