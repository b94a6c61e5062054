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

from drafter_service.observability.logs import configure_logs
from drafter_service.observability.withhold import LONGEST_TEXT, withhold
from ssd.errors import UserError

SECRET = "Dear Mr Holmes, the hound was seen again"
TOKENS = np.arange(7000, 7040, dtype=np.uint32)


@pytest.fixture
def logs():
    """What was logged, as JSON lines, and the stream; everything is as before afterwards."""
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


def test_a_line_says_when_who_and_what(logs):
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


def test_logs_of_libraries_go_the_same_way(logs):
    logging.getLogger("redis").warning("lost %s, attempt %d", "localhost:6379", 2)
    logging.getLogger("redis").debug("unseen")
    warnings.warn("old", stacklevel=1)
    first, second = logs()
    assert (first["event"], first["level"], first["logger"]) == ("lost localhost:6379, attempt 2", "warning", "redis")
    assert second["logger"] == "py.warnings"


def test_the_level_is_ours_and_libraries_stay_quiet(logs):
    configure_logs("json", "debug", stream := io.StringIO())
    structlog.get_logger("drafter_service.x").debug("seen")
    logging.getLogger("ssd.corpus.corpus").debug("seen too")
    logging.getLogger("numba").debug("not seen")
    assert [json.loads(line)["event"] for line in stream.getvalue().splitlines()] == ["seen", "seen too"]
    configure_logs("json", "error", stream := io.StringIO())
    structlog.get_logger("drafter_service.x").warning("not seen")
    assert not stream.getvalue()


def test_the_console_gets_one_line_for_an_event_and_no_locals(logs):
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
def test_what_could_be_tokens_or_text_is_withheld_under_any_name(logs, value):
    structlog.get_logger("drafter_service.x").info("learned", detail=value)
    logging.getLogger("somebody").warning("learned %s", value)
    logging.getLogger("somebody").warning(value)
    lines = json.dumps([{**line, "timestamp": ""} for line in logs()])
    assert len(logs()) == 3
    assert "700" not in lines
    assert "Holmes" not in lines


@pytest.mark.parametrize("name", ["tokens", "prompt", "text", "prompt_text", "completion", "draft", "Content", "token"])
def test_names_that_promise_text_may_only_have_numbers(logs, name):
    structlog.get_logger("drafter_service.x").info("learned", **{name: SECRET})
    structlog.get_logger("drafter_service.x").info("learned", **{name: 512})
    first, second = logs()
    assert first[name] == f"<withheld: str, {len(SECRET)}>"
    assert second[name] == 512


def test_numbers_names_and_paths_are_told(logs):
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
    told = {name: line[name] for name in ("count", "seconds", "share", "ok", "nothing", "path", "names")}
    assert told == {
        "count": 5,
        "seconds": 0.5,
        "share": "nan",
        "ok": True,
        "nothing": None,
        "path": "/srv/a b",
        "names": ["main", "b"],
    }


def test_an_exception_is_told_by_kind_and_place(logs):
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


def test_errors_that_name_only_files_and_settings_speak(logs):
    structlog.get_logger("drafter_service.x").error("stopped", exc_info=raised(UserError("reports.metrics: no port")))
    structlog.get_logger("drafter_service.x").error("not saved", reason=raised(OSError(28, "No space left", "/srv/x")))
    first, second = logs()
    assert first["raised"] == "UserError: reports.metrics: no port"
    assert second["reason"] == "OSError: [Errno 28] No space left: '/srv/x'"


def test_no_line_can_be_forged(logs):
    configure_logs("console", "info", stream := io.StringIO())
    forged = "engine\n2026-01-01 [error] gone\x1b[2J"
    structlog.get_logger("drafter_service.x").info(f"hello {forged}", client=forged)
    assert len(stream.getvalue().splitlines()) == 1
    assert "\x1b[2J" not in stream.getvalue()


def test_passwords_in_addresses_are_withheld(logs):
    structlog.get_logger("drafter_service.x").info("log lost", url="redis://ann:pa55@host:6379/0")
    assert logs()[0]["url"] == "redis://***@host:6379/0"


def test_of_what_a_library_says_in_many_lines_the_first_is_told(logs):
    logging.getLogger("somebody").error(f"it failed\nprompt: {SECRET}")
    assert logs()[0]["event"] == "it failed"


def test_what_asyncio_tells_of_tasks_and_callbacks_has_no_values(logs):
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
    # It shortens what it writes out, so that only the ends of a text remain.
    assert not {"Dear", "Holmes", "again"} & set(re.findall(r"\w+", json.dumps(lines)))


def test_what_grpc_tells_of_a_failed_handler_has_no_values(logs):
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
    # gRPC's poller, one for the whole process, may also complain of a loop that an earlier test has closed.
    lines = logs()
    assert sum(line["raised"] == "ValueError" for line in lines) == 1
    assert "Holmes" not in json.dumps(lines)


def test_a_thread_that_dies_is_logged(logs):
    def die():
        raise ValueError(SECRET)

    thread = threading.Thread(target=die)
    thread.start()
    thread.join()
    (line,) = logs()
    assert (line["event"], line["raised"]) == ("uncaught exception", "ValueError")
    assert "Holmes" not in json.dumps(line)


def test_the_end_of_a_process_is_logged_to_stderr():
    program = f"from drafter_service.observability.logs import configure_logs; configure_logs('json'); raise ValueError({SECRET!r})"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    (line,) = done.stderr.splitlines()
    assert (done.returncode, done.stdout, json.loads(line)["raised"]) == (1, "", "ValueError")


ANYTHING = st.recursive(
    st.integers() | st.floats() | st.text() | st.binary() | st.none() | st.booleans(),
    lambda inner: st.lists(inner, max_size=20) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=5,
)


@given(st.dictionaries(st.text(min_size=1), ANYTHING, max_size=3), ANYTHING)
def test_whatever_is_logged_can_be_written_and_stays_short(values, message):
    kept = withhold(None, "info", {"event": message, **values})
    for value in kept.values():
        text = value if isinstance(value, str) else json.dumps(value, allow_nan=False)
        assert len(text) <= 16 * 10 * LONGEST_TEXT
        assert "\n" not in text
