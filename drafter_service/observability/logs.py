"""Structured logs to stderr: events with numbers, names of namespaces, and settings of the operator.

No text of callers reaches a line. The service's modules pass none to a logger. Exceptions and warnings are logged by
type and location, since their messages may quote a request; of libraries' messages only the format is logged, without
its arguments, or the location of one that was formatted before. Modules log through `structlog.get_logger(__name__)`,
or through `logging` if they must not depend on structlog.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from pathlib import PurePath
from types import TracebackType
from typing import Any, Literal, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import EventDict, Processor, WrappedLogger

OWN_LOGGERS = ("drafter_service", "ssd")
Level = Literal["debug", "info", "warning", "error"]
Style = Literal["json", "console"]


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
    renderer: Processor = structlog.processors.JSONRenderer(sort_keys=True)
    if style == "console":
        renderer = structlog.dev.ConsoleRenderer(colors=stream.isatty())
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            processors=[_without_values, ProcessorFormatter.remove_processors_meta, renderer],
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


def _log_uncaught(kind: type[BaseException], problem: BaseException | None, trace: TracebackType | None) -> None:
    if problem is None or issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, problem or kind(), trace)
        return
    structlog.get_logger(__name__).error("uncaught exception", exc_info=(kind, problem, trace))


def _without_values(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Reduce exceptions to type and location, and messages of libraries to what is constant."""
    record, exc_info = event["_record"], event.pop("exc_info", None)
    event.pop("stack_info", None)
    if not event["_from_structlog"]:
        event["event"] = _constant_part(record, event.pop("positional_args"))
    problem = exc_info[1] if isinstance(exc_info, tuple) else exc_info if exc_info is not True else sys.exc_info()[1]
    if isinstance(problem, BaseException):
        event["raised"] = type(problem).__name__
        if isinstance(problem, OSError) and problem.strerror:
            event["raised"] += f": {problem.strerror}"
        event["raised_at"] = _places(problem)
    # A line break or a terminal's escape could forge a line of the log.
    return {key: _printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _constant_part(record: logging.LogRecord, args: Any) -> str:
    root, message = record.name.partition(".")[0], str(record.msg)
    if root in (*OWN_LOGGERS, "py"):
        message = message % args if args else message
        # A warning begins with its place and its type.
        return message if root in OWN_LOGGERS else ": ".join(message.split(": ")[:2])
    return message if args else f"message at {PurePath(record.pathname).name}:{record.lineno}"


def _printable(text: str) -> str:
    return text if text.isprintable() else repr(text)[1:-1]


def _places(problem: BaseException) -> str:
    """Return the locations of the traceback, innermost first, without source lines."""
    frames = traceback.extract_tb(problem.__traceback__)
    return " < ".join(f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
