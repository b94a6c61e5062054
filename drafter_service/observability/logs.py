"""Structured logs to stderr, from which tokens and text are kept out whatever somebody logs.

Those of libraries go the same way. Modules log by `structlog.get_logger(__name__)`, or by `logging` where structlog
is not wanted.
"""

from __future__ import annotations

import logging
import sys
import threading
from types import TracebackType
from typing import Literal, TextIO

import structlog
from structlog.stdlib import ProcessorFormatter
from structlog.typing import Processor

from drafter_service.observability.withhold import withhold

OWN_LOGGERS = ("drafter_service", "ssd")
Level = Literal["debug", "info", "warning", "error"]
Style = Literal["json", "console"]


def configure_logs(style: Style = "console", level: Level = "info", stream: TextIO | None = None) -> None:
    """Send all logs of the process to `stream`, standard error by default, and uncaught exceptions too."""
    stream = stream or sys.stderr
    described: list[Processor] = [
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *described, ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            processors=[withhold, ProcessorFormatter.remove_processors_meta, _renderer(style, stream)],
            foreign_pre_chain=described,
            use_get_message=False,
            pass_foreign_args=True,
        )
    )
    number = logging.getLevelNamesMapping()[level.upper()]
    # At "debug" libraries tell more than anyone can read.
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
