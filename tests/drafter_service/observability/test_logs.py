"""Structured logs, which contain no text of callers."""

import asyncio
import io
import json
import logging
import os
import re
import signal
import subprocess
import sys
import threading
import warnings
from contextlib import suppress

import grpc
import pytest
import structlog

from drafter_service.observability.logs import configure_logs
from drafter_service.stubs import drafter_pb2 as pb
from ssd.errors import UserError
from tests.drafter_service.raw import batch, connected, hello, start
from tests.servers import served

SECRET = "Dear Mr Holmes, the hound was seen again"
own = structlog.get_logger("drafter_service.x")


@pytest.fixture
def logs():
    """Return a function that returns the logged JSON documents; the logging configuration is restored."""
    root, loggers = logging.getLogger(), [logging.getLogger(name) for name in ("drafter_service", "ssd")]
    before = root.handlers[:], root.level, [logger.level for logger in loggers], sys.excepthook, threading.excepthook
    stream = io.StringIO()
    configure_logs("json", "info", stream)
    yield lambda: lines_of(stream)
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level, levels, sys.excepthook, threading.excepthook = before
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def lines_of(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def raised(problem):
    try:
        raise problem from ValueError(SECRET)
    except BaseException as caught:
        return caught


def test_lines_have_time_logger_and_event(logs):
    own.info("stream opened", namespace="main", streams=3)
    (line,) = logs()
    assert line.pop("timestamp").endswith("Z")
    expected = {"event": "stream opened", "level": "info", "logger": "drafter_service.x", "namespace": "main"}
    assert line == {**expected, "streams": 3}


def test_messages_of_libraries_are_logged_without_arguments(logs):
    logging.getLogger("redis").warning("lost %s, attempt %d", SECRET, 2)
    logging.getLogger("redis").debug("unseen")
    warnings.warn(SECRET, stacklevel=1)
    logging.getLogger("library").error(f"it failed\nprompt: {SECRET}")
    patterns = {"redis": "lost %s, attempt %d", "py.warnings": ".*: UserWarning", "library": r"message at .*\.py:\d+"}
    for line, (logger, event) in zip(logs(), patterns.items(), strict=True):
        assert line["logger"] == logger
        assert re.fullmatch(event, line["event"])


def test_levels_apply_to_own_loggers_only(logs):
    for level, expected in (("debug", ["seen", "seen too"]), ("error", [])):
        configure_logs("json", level, stream := io.StringIO())
        own.debug("seen")
        logging.getLogger("ssd.corpus.corpus").debug("seen %s", "too")
        logging.getLogger("numba").debug("not seen")
        assert [line["event"] for line in lines_of(stream)] == expected


@pytest.mark.parametrize("style", ["json", "console"])
def test_an_event_is_one_line_that_cannot_be_forged(logs, style):
    configure_logs(style, "info", stream := io.StringIO())
    forged = "engine\n2026-01-01 [error] gone\x1b[2J"
    own.info(f"hello {forged}", namespace=forged)
    logging.getLogger("ssd.x").error("hello %s", forged)
    own.error("failed", exc_info=raised(KeyError(SECRET)), streams=3)
    *forgeries, line = stream.getvalue().splitlines()
    assert len(forgeries) == 2
    assert "\x1b[2J" not in stream.getvalue()
    assert all(part in line for part in ("failed", "KeyError", "streams", "3"))
    assert "Holmes" not in line


def test_exceptions_are_logged_by_type_and_location(logs):
    own.error("failed", exc_info=raised(KeyError(SECRET)))
    logging.getLogger("grpc").error(f"it said {SECRET!r}", exc_info=raised(UserError(SECRET)))
    own.error("not saved", exc_info=raised(OSError(28, "No space left", SECRET)))
    try:
        raise KeyError(SECRET)
    except KeyError:
        logging.getLogger("grpc").exception("handler failed")
    assert [line["raised"] for line in logs()] == ["KeyError", "UserError", "OSError: No space left", "KeyError"]
    assert all(line["raised_at"].startswith("test_logs.py:") for line in logs())
    assert "Holmes" not in json.dumps(logs())


def test_asyncio_messages_contain_no_values(logs):
    def fail(text):
        raise ValueError(text)

    async def main():
        loop = asyncio.get_running_loop()
        loop.call_soon(fail, SECRET)
        loop.call_exception_handler({"message": "Unhandled", "exception": raised(ValueError(SECRET)), "prompt": SECRET})
        task = asyncio.ensure_future(asyncio.to_thread(fail, SECRET))
        await asyncio.wait([task])
        del task

    asyncio.run(main())
    lines = logs()
    assert len(lines) == 3
    assert all(line["raised"] == "ValueError" for line in lines)
    # asyncio shortens representations, so only the ends of a text would appear.
    assert not {"Dear", "Holmes", "again"} & set(re.findall(r"\w+", json.dumps(lines)))


def test_grpc_messages_contain_no_values(logs):
    async def fail(request, _context):
        raise ValueError(f"cannot use {request!r}")

    async def main():
        server = grpc.aio.server()
        handler = grpc.unary_unary_rpc_method_handler(fail)
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler("s", {"m": handler})])
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            with pytest.raises(grpc.aio.AioRpcError):
                await channel.unary_unary("/s/m")(SECRET.encode())
        await server.stop(None)

    asyncio.run(main())
    # gRPC's poller is shared by the process and may also report a loop that an earlier test has closed.
    lines = logs()
    assert sum(line["raised"] == "ValueError" for line in lines) == 1
    assert "Holmes" not in json.dumps(lines)


UNCAUGHT = f"""
import threading
from drafter_service.observability.logs import configure_logs
def die():
    raise ValueError({SECRET!r})
configure_logs("json")
thread = threading.Thread(target=die)
thread.start()
thread.join()
die()
"""


def test_uncaught_exceptions_are_logged_to_stderr():
    done = subprocess.run([sys.executable, "-c", UNCAUGHT], capture_output=True, text=True, timeout=60)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert (done.returncode, done.stdout) == (1, "")
    assert [(line["event"], line["raised"]) for line in lines] == [("uncaught exception", "ValueError")] * 2
    assert "Holmes" not in done.stderr


def test_no_text_of_callers_reaches_the_log_of_the_service(socket_address):
    """Send text, tokens, keys and names of files wherever a request takes them, most of them to be refused."""
    key, file, token = "9c1185a5c5e9fc54612808977ee8f548", f"/home/watson/{SECRET}.txt", 770_077
    names = {"name": file, "tokenizer": SECRET, "adapter": key, "vocab_size": 10**6}
    known = {"sequence_id": 1, "prompt": [token] * 9, "request_id": file, "session_id": key}
    refused = [
        {"hello": hello("a", tokenizer=key)},
        *({"hello": hello(name)} for name in (SECRET, file, f"{key}\n", "x" * 200 + SECRET)),
        {"hello": pb.Hello(protocol=3, namespace="b", engine=SECRET, client=file)},
        {"hello": hello("c", name=SECRET * 20)},
        {"request": SECRET.encode() * 9},
        {"hello": hello("d", vocab_size=token), "starts": [start(1, [token])]},
        {"hello": hello("e"), "starts": [start(1, [1], request_id=SECRET * 20)]},
        {"hello": hello("f"), "starts": [start(1, [1], rollout=pb.Rollout(group=SECRET * 20))]},
    ]
    with served("--listen", socket_address, "--capacity", "100k", "--log-format", "json") as process:
        with connected(socket_address, metadata=[("authorization", f"Bearer {key}")]) as caller:
            stream = caller.stream("a", **names)
            stream.exchange(starts=[start(**known)], batch=batch({1: [token]}, limit=9))
            caller.observe("a", [token] * 20, names=[file])
            caller.call("Forget", namespace="a", request_id=file)
            caller.refusal("Forget", namespace=SECRET, request_id=file)
            for request in refused:
                opened = caller.stream()
                with suppress(grpc.RpcError):
                    assert opened.exchange(**request).HasField("error")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
        log = os.pread(process.log.fileno(), 1 << 20, 0).decode()
    events = {json.loads(line)["event"] for line in log.splitlines()}
    assert {"namespace loaded", "stream refused", "call refused"} <= events
    for secret in ("Holmes", "hound", "watson", key, str(token)):
        assert secret not in log
