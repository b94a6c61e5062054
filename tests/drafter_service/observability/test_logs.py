"""Structured logs, and redaction of tokens and text."""

import asyncio
import io
import json
import logging
import re
import subprocess
import sys
import threading
import warnings
from pathlib import Path

import grpc
import numpy as np
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.observability.logs import MAX_TEXT, configure_logs, redact
from ssd.errors import UserError

SECRET = "Dear Mr Holmes, the hound was seen again"
TOKENS = np.arange(7000, 7040, dtype=np.uint32)


@pytest.fixture
def logs():
    """Return a function that returns the logged JSON documents; the logging configuration is restored."""
    root, own = logging.getLogger(), [logging.getLogger(name) for name in ("drafter_service", "ssd")]
    before = root.handlers[:], root.level, [logger.level for logger in own], sys.excepthook, threading.excepthook
    stream = io.StringIO()
    configure_logs("json", "info", stream)
    yield lambda: [json.loads(line) for line in stream.getvalue().splitlines()]
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level, levels, sys.excepthook, threading.excepthook = before
    for logger, level in zip(own, levels, strict=True):
        logger.setLevel(level)


def raised(problem):
    try:
        raise problem
    except BaseException as caught:
        return caught


def test_lines_have_time_logger_and_event(logs):
    structlog.get_logger("drafter_service.server.server").info("stream opened", namespace="main", streams=3)
    (line,) = logs()
    assert line.pop("timestamp").endswith("Z")
    assert line == {
        "event": "stream opened",
        "level": "info",
        "logger": "drafter_service.server.server",
        "namespace": "main",
        "streams": 3,
    }


def test_logs_of_libraries_are_processed_in_the_same_way(logs):
    logging.getLogger("redis").warning("lost %s, attempt %d", "localhost:6379", 2)
    logging.getLogger("redis").debug("unseen")
    warnings.warn("old", stacklevel=1)
    first, second = logs()
    assert (first["event"], first["level"], first["logger"]) == ("lost localhost:6379, attempt 2", "warning", "redis")
    assert second["logger"] == "py.warnings"


def test_debug_level_applies_to_own_loggers_only(logs):
    configure_logs("json", "debug", stream := io.StringIO())
    structlog.get_logger("drafter_service.x").debug("seen")
    logging.getLogger("ssd.corpus.corpus").debug("seen too")
    logging.getLogger("numba").debug("not seen")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["seen", "seen too"]
    configure_logs("json", "error", stream := io.StringIO())
    structlog.get_logger("drafter_service.x").warning("not seen")
    assert not stream.getvalue()


def test_console_format_has_one_line_per_event_without_locals(logs):
    configure_logs("console", "info", stream := io.StringIO())
    prompt = SECRET
    try:
        raise KeyError(prompt)
    except KeyError:
        structlog.get_logger("drafter_service.x").exception("failed", namespace="main")
    (line,) = stream.getvalue().splitlines()
    assert "failed" in line
    assert "KeyError" in line
    assert "namespace=main" in line
    assert "Holmes" not in line


@pytest.mark.parametrize(
    "value",
    [
        TOKENS,
        TOKENS.tolist(),
        tuple(TOKENS.tolist()),
        [7001],
        {7001, 7002},
        {"a": 7001},
        TOKENS.tobytes(),
        bytearray(b"7001"),
        memoryview(b"7001"),
        [TOKENS],
        [SECRET * 10],
        SECRET * 10,
        ["7001"] * 17,
        object(),
        KeyError(SECRET),
    ],
    ids=lambda value: type(value).__name__,
)
def test_possible_tokens_and_text_are_redacted_under_any_name(logs, value):
    structlog.get_logger("drafter_service.x").info("learned", detail=value)
    logging.getLogger("library").warning("learned %s", value)
    logging.getLogger("library").warning(value)
    lines = json.dumps([{**line, "timestamp": ""} for line in logs()])
    assert len(logs()) == 3
    assert "700" not in lines
    assert "Holmes" not in lines


@pytest.mark.parametrize("name", ["tokens", "prompt", "text", "prompt_text", "completion", "draft", "Content", "token"])
def test_values_under_names_of_text_are_redacted_unless_numbers(logs, name):
    structlog.get_logger("drafter_service.x").info("learned", **{name: SECRET})
    structlog.get_logger("drafter_service.x").info("learned", **{name: 512})
    first, second = logs()
    assert first[name] == f"<redacted: str, {len(SECRET)}>"
    assert second[name] == 512


def test_numbers_names_and_paths_are_logged(logs):
    structlog.get_logger("drafter_service.x").info(
        "saved",
        count=np.int64(5),
        seconds=np.float32(0.5),
        share=float("nan"),
        ok=True,
        nothing=None,
        path=Path("/srv/a b"),
        names=["main", "b"],
    )
    (line,) = logs()
    logged = {name: line[name] for name in ("count", "seconds", "share", "ok", "nothing", "path", "names")}
    assert logged == {
        "count": 5,
        "seconds": 0.5,
        "share": "nan",
        "ok": True,
        "nothing": None,
        "path": "/srv/a b",
        "names": ["main", "b"],
    }


def test_exceptions_are_logged_by_type_and_location(logs):
    try:
        raise KeyError(SECRET) from ValueError(SECRET)
    except KeyError:
        structlog.get_logger("drafter_service.x").exception("failed")
        logging.getLogger("grpc").exception("handler failed")
        logging.getLogger("grpc").error(f"it said {SECRET!r}", exc_info=True)
    for line in logs():
        assert line["raised"] == "KeyError"
        assert line["raised_at"].startswith("test_logs.py:")
    assert "Holmes" not in json.dumps(logs())


def test_messages_of_safe_errors_are_logged(logs):
    structlog.get_logger("drafter_service.x").error("stopped", exc_info=raised(UserError("reports.metrics: no port")))
    structlog.get_logger("drafter_service.x").error("not saved", reason=raised(OSError(28, "No space left", "/srv/x")))
    first, second = logs()
    assert first["raised"] == "UserError: reports.metrics: no port"
    assert second["reason"] == "OSError: [Errno 28] No space left: '/srv/x'"


def test_lines_cannot_be_forged(logs):
    configure_logs("console", "info", stream := io.StringIO())
    forged = "engine\n2026-01-01 [error] gone\x1b[2J"
    structlog.get_logger("drafter_service.x").info(f"hello {forged}", client=forged)
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b[2J" not in stream.getvalue()


def test_passwords_in_addresses_are_redacted(logs):
    structlog.get_logger("drafter_service.x").info("log lost", url="redis://ann:pa55@host:6379/0")
    assert logs()[0]["url"] == "redis://***@host:6379/0"


def test_only_the_first_line_of_a_library_message_is_logged(logs):
    logging.getLogger("library").error(f"it failed\nprompt: {SECRET}")
    assert logs()[0]["event"] == "it failed"


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


def test_exceptions_in_threads_are_logged(logs):
    def die():
        raise ValueError(SECRET)

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    (line,) = logs()
    assert (line["event"], line["raised"]) == ("uncaught exception", "ValueError")
    assert "Holmes" not in json.dumps(line)


def test_uncaught_exceptions_are_logged_to_stderr():
    configure = "from drafter_service.observability.logs import configure_logs; configure_logs('json')"
    program = f"{configure}; raise ValueError({SECRET!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, json.loads(line)["raised"]) == (1, "", "ValueError")


ANYTHING = st.recursive(
    st.integers() | st.floats() | st.text() | st.binary() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(min_size=1), ANYTHING, max_size=3), ANYTHING)
def test_any_value_can_be_logged_and_stays_short(values, message):
    allowed = redact(None, "info", {"event": message, **values})
    for value in allowed.values():
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        assert len(text) <= 16 * 10 * MAX_TEXT
        assert "\n" not in text
