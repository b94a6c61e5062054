"""Structured logs to stderr. Tokens, text and secrets are redacted from everything that callers pass.

Logs of libraries are processed in the same way. Modules log through `structlog.get_logger(__name__)`, or through
`logging` if they must not depend on structlog.
"""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import threading
import traceback
from numbers import Integral, Real
from pathlib import PurePath
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

from ssd.errors import UserError

OWN_LOGGERS = ("drafter_service", "ssd")
Level = Literal["debug", "info", "warning", "error"]
Style = Literal["json", "console"]

MAX_TEXT = 300
"""Maximum number of characters of a text: enough for a path or an error, too short for most prompts."""
MAX_LIST = 16
REDACTED_NAMES = frozenset(
    [
        "authorization",
        "body",
        "completion",
        "completions",
        "content",
        "contents",
        "context",
        "draft",
        "drafts",
        "message",
        "messages",
        "password",
        "payload",
        "prompt",
        "prompts",
        "secret",
        "text",
        "texts",
        "token",
        "tokens",
    ]
)
"""Words in keys whose values are redacted unless they are numbers: `tokens=512` is a count."""
SAFE_ERRORS = (UserError, OSError)
"""Types of errors whose messages contain only settings, files and addresses."""
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")


def configure_logs(style: Style = "console", level: Level = "info", stream: TextIO | None = None) -> None:
    """Send all logs of the process, and uncaught exceptions, to `stream` (default: standard error)."""
    stream = stream or sys.stderr
    annotations: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *annotations, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            processors=[redact, ProcessorFormatter.remove_processors_meta, _renderer(style, stream)],
            foreign_pre_chain=annotations,
            use_get_message=False,
            pass_foreign_args=True,
        )
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    # Debug logs of libraries are too verbose.
    logging.basicConfig(handlers=[handler], level=max(number, logging.INFO), force=True)
    for name in OWN_LOGGERS:
        logging.getLogger(name).setLevel(number)
    logging.captureWarnings(True)
    sys.excepthook = _log_uncaught
    threading.excepthook = lambda thread: _log_uncaught(thread.exc_type, thread.exc_value, thread.exc_traceback)


def _renderer(style: Style, stream: TextIO) -> Processor:
    if style == "json":
        return structlog.processors.JSONRenderer(sort_keys=True)
    return structlog.dev.ConsoleRenderer(colors=stream.isatty())


def _log_uncaught(kind: type[BaseException], problem: BaseException | None, trace: TracebackType | None) -> None:
    if problem is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, problem or kind(), trace)
        return
    structlog.get_logger(__name__).error("uncaught exception", exc_info=(kind, problem, trace))


# --- Redaction


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replace values that may not appear in a log by their type and size. This is a structlog processor.

    Allowed are numbers, short names, paths and kinds of errors.
    """
    record = event.pop("_record", None)
    is_ours = event.pop("_from_structlog", True)
    problem = _exception_of(event.pop("exc_info", None))
    event.pop("stack_info", None)
    arguments = event.pop("positional_args", None)
    message = event.pop("event", "")
    if record is not None and not is_ours:
        message = _formatted(record, arguments, problem)
    allowed: EventDict = {key: _allowed(key, value) for key, value in event.items()}
    allowed["event"] = _allowed("event", message)
    if problem is not None:
        allowed["raised"] = _describe(problem)
        allowed["raised_at"] = _places(problem)
    if record is not None:
        allowed["_record"], allowed["_from_structlog"] = record, is_ours
    return allowed


def _allowed(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if REDACTED_NAMES.intersection(key.lower().split("_")):
        return _placeholder(value)
    if isinstance(value, BaseException):
        return _describe(value)
    if isinstance(value, str | PurePath):
        return _allowed_text(str(value))
    if isinstance(value, list | tuple) and len(value) <= MAX_LIST and all(isinstance(item, str) for item in value):
        return [_allowed_text(item) for item in value]
    return _placeholder(value)


def _allowed_text(text: str) -> str:
    if len(text) > MAX_TEXT:
        return _placeholder(text)
    # A line break or a terminal's escape could forge a line of the log.
    return _PASSWORD.sub("***@", text if text.isprintable() else repr(text)[1:-1])


def _placeholder(value: Any) -> str:
    size = f", {len(value)}" if hasattr(value, "__len__") else ""
    return f"<redacted: {type(value).__name__}{size}>"


def _formatted(record: logging.LogRecord, arguments: Any, problem: BaseException | None) -> Any:
    """Return the message of a library: its template, filled with the allowed arguments."""
    message = record.msg
    if not isinstance(message, str):
        return message
    if arguments:
        given = arguments if isinstance(arguments, tuple) else (arguments,)
        # A template that does not match its arguments is logged unchanged.
        with contextlib.suppress(TypeError, ValueError):
            message = message % tuple(_allowed("", value) for value in given)
    message = message.partition("\n")[0]
    if record.name == "asyncio":
        # The rest of the message is the representation of tasks, callbacks and their arguments.
        message = re.split("[(<]", message)[0].strip()
    if problem is not None and str(problem):
        message = message.replace(str(problem), _describe(problem))
    return message


def _exception_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, tuple):
        return exc_info[1]
    if isinstance(exc_info, BaseException):
        return exc_info
    return sys.exc_info()[1] if exc_info else None


def _describe(problem: BaseException) -> str:
    """Return the type of an error, and its message only if that is known to be safe."""
    name = type(problem).__name__
    return f"{name}: {_allowed_text(str(problem))}" if isinstance(problem, SAFE_ERRORS) else name


def _places(problem: BaseException) -> str:
    """Return the locations of the traceback, innermost first, without source lines."""
    frames = traceback.extract_tb(problem.__traceback__)
    return " < ".join(f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
