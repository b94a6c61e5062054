"""What may stand in a log: numbers, short names, kinds of errors. Never tokens, text or keys to anything."""

from __future__ import annotations

import contextlib
import logging
import math
import re
import sys
import traceback
from numbers import Integral, Real
from pathlib import PurePath
from typing import Any

from structlog.typing import EventDict, WrappedLogger

from ssd.errors import UserError

LONGEST_TEXT = 300
"""Characters: a path or an error fits, a prompt hardly."""
LONGEST_LIST = 16
WITHHELD_NAMES = frozenset(
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
        "passage",
        "passages",
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
"""A key of which a word is one of these may only have a number: `tokens=512` is how many."""
SPEAKING_ERRORS = (UserError, OSError)
"""Errors whose message is known to name nothing but settings, files and addresses."""
_PASSWORD = re.compile(r"(?<=://)[^/@\s]*:[^/@\s]*@")


def withhold(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """A processor of structlog's: whatever may not stand in a log is replaced by its kind and size."""
    record = event.pop("_record", None)
    is_ours = event.pop("_from_structlog", True)
    problem = _exception_of(event.pop("exc_info", None))
    event.pop("stack_info", None)
    arguments = event.pop("positional_args", None)
    message = event.pop("event", "")
    if record is not None and not is_ours:
        message = _formatted(record, arguments, problem)
    kept: EventDict = {key: _allowed(key, value) for key, value in event.items()}
    kept["event"] = _allowed("event", message)
    if problem is not None:
        kept["raised"] = _told(problem)
        kept["raised_at"] = _places(problem)
    if record is not None:
        kept["_record"], kept["_from_structlog"] = record, is_ours
    return kept


def _allowed(key: str, value: Any) -> Any:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else str(number)
    if WITHHELD_NAMES.intersection(key.lower().split("_")):
        return _withheld(value)
    if isinstance(value, BaseException):
        return _told(value)
    if isinstance(value, str | PurePath):
        return _allowed_text(str(value))
    if isinstance(value, list | tuple) and len(value) <= LONGEST_LIST and all(isinstance(item, str) for item in value):
        return [_allowed_text(item) for item in value]
    return _withheld(value)


def _allowed_text(text: str) -> str:
    if len(text) > LONGEST_TEXT:
        return _withheld(text)
    # A line break or a terminal's escape could forge a line of the log.
    return _PASSWORD.sub("***@", text if text.isprintable() else repr(text)[1:-1])


def _withheld(value: Any) -> str:
    size = f", {len(value)}" if hasattr(value, "__len__") else ""
    return f"<withheld: {type(value).__name__}{size}>"


def _formatted(record: logging.LogRecord, arguments: Any, problem: BaseException | None) -> Any:
    """A library's message: its template with what may stand in it."""
    message = record.msg
    if not isinstance(message, str):
        return message
    if arguments:
        given = arguments if isinstance(arguments, tuple) else (arguments,)
        # A template that does not take them stands for itself.
        with contextlib.suppress(TypeError, ValueError):
            message = message % tuple(_allowed("", value) for value in given)
    message = message.partition("\n")[0]
    if record.name == "asyncio":
        # It goes on with tasks, callbacks and their arguments, written out.
        message = re.split("[(<]", message)[0].strip()
    if problem is not None and str(problem):
        message = message.replace(str(problem), _told(problem))
    return message


def _exception_of(exc_info: Any) -> BaseException | None:
    if isinstance(exc_info, tuple):
        return exc_info[1]
    if isinstance(exc_info, BaseException):
        return exc_info
    return sys.exc_info()[1] if exc_info else None


def _told(problem: BaseException) -> str:
    """Its kind, and what it says only if that is known to be harmless."""
    name = type(problem).__name__
    return f"{name}: {_allowed_text(str(problem))}" if isinstance(problem, SPEAKING_ERRORS) else name


def _places(problem: BaseException) -> str:
    """Where it was raised, innermost first, without the lines of source."""
    frames = traceback.extract_tb(problem.__traceback__)
    return " < ".join(f"{PurePath(frame.filename).name}:{frame.lineno} {frame.name}" for frame in reversed(frames))
