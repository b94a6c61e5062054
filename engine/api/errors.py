"""Error responses in the format of OpenAI's API."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from engine.api.engine_process import EngineGoneError
from engine.api.fields import HARMLESS, REPLACEMENTS
from ssd.errors import UserError

ERROR_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
"""Types by status. Others are `server_error` from 500 on, and `invalid_request_error` below."""
HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},
    429: {"Retry-After": "1"},
    503: {"Retry-After": "5"},
}
LEADING_PARAM = re.compile(r"([a-z]+(?:_[a-z]+)*)(?::| must | holds | needs )")
"""Matches the parameter name at the start of an error message about a parameter."""
TYPE_NAME = re.compile(r"(str|int|float|bool|ContentPart|Tool)$|list\[|dict\[|constrained-|function-")
"""Matches what pydantic adds to the path of an error: the type that it tried."""
ALIASES = {
    "prompt_logprobs": "logprobs",
    "json_schema": "response_format.json_schema",
    "regex": "structured_outputs.regex",
    "choice": "structured_outputs.choice",
}
"""Maps the engine's parameter names to request fields where they differ."""
CHAT_FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
"""Fields that only chats support. Errors of completions name the endpoint for chats rather than call them unknown."""
EITHER_TYPE = {
    "prompt": "a string or a list of token ids, or a list of either",
    "stop": "a string or a list of strings",
    "content": "a string or a list of parts of the type text",
    "tool_choice": "none, auto, required, or an object that names a function",
}
"""Descriptions of fields that have several possible types."""


class ApiError(Exception):
    """Error that is returned to the client."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def error_body(error: ApiError) -> dict[str, object]:
    """Return the JSON of an error."""
    kind = ERROR_TYPES.get(error.status, "server_error" if error.status >= 500 else "invalid_request_error")
    param = error.param and _encodable(error.param)
    return {"error": {"message": _encodable(error.message), "type": kind, "param": param, "code": error.code}}


def error_response(error: ApiError) -> JSONResponse:
    """Return the HTTP response for an error."""
    return JSONResponse(error_body(error), error.status, HEADERS.get(error.status))


@contextmanager
def engine_errors(prompt_field: str) -> Iterator[None]:
    """Convert errors of the engine to an ApiError. prompt_field: name of the request field with the prompt."""
    try:
        yield
    except UserError as problem:
        raise _from_engine(str(problem), prompt_field) from None
    except EngineGoneError as problem:
        raise ApiError(503, f"the engine has stopped: {problem}") from None


def _from_engine(message: str, prompt_field: str) -> ApiError:
    if message.startswith("the prompt"):
        code = "context_length_exceeded" if "shorten" in message else None
        return ApiError(400, message, param=prompt_field, code=code)
    if (found := LEADING_PARAM.match(message)) is None:
        return ApiError(400, message)
    param = ALIASES.get(found[1], found[1])
    return ApiError(400, param + message[found.end(1) :], param=param)


def from_validation(problem: RequestValidationError) -> ApiError:
    """Convert the first problem that pydantic found in a request body."""
    errors = problem.errors()
    missing = [path for error in errors if error["type"] == "missing" and len(path := _path_of(error)) < 2]
    if missing:
        return _missing(missing)
    # For a field of several possible types, prefer the error of the type that was sent over "wrong type" errors.
    place = errors[0]["loc"][:2]
    same_type = [error for error in errors if error["loc"][:2] == place and not error["type"].endswith("_type")]
    first = (same_type or errors)[0]
    path, message = _path_of(first), str(first["msg"]).removeprefix("Value error, ")
    param = ".".join(path) or None
    if not same_type and (either := _either_type(path, errors)) is not None:
        return ApiError(400, f"{either[0]}: must be {either[1]}", param=either[0])
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "model_attributes_type" and param is None:
        # FastAPI passes a body on as bytes if its content type is not JSON.
        is_unparsed = isinstance(first["input"], bytes)
        return ApiError(
            400, "send the header Content-Type: application/json" if is_unparsed else "the body must be a JSON object"
        )
    if param is None and (found := LEADING_PARAM.match(message)) is not None:
        return ApiError(400, message, param=found[1])
    if first["type"] == "extra_forbidden" and param is not None:
        return _unknown(param)
    return ApiError(400, f"{param or 'the body'}: {message}", param=param)


def from_http(problem: HTTPException) -> ApiError:
    """Convert an error of the web framework."""
    # FastAPI reports all exceptions of parsing a body alike.
    if isinstance(problem.__cause__, UnicodeDecodeError):
        return ApiError(400, "the body is not UTF-8")
    if isinstance(problem.__cause__, RecursionError):
        return ApiError(400, "the body is nested too deeply")
    return ApiError(problem.status_code, str(problem.detail))


def _missing(paths: list[list[str]]) -> ApiError:
    """Return the error for missing fields; an empty path stands for an empty body."""
    if not paths[0]:
        message = "the body is empty; send a JSON object with the fields model and prompt, or model and messages"
        return ApiError(400, message, param="model")
    names = [name for [name] in paths]
    return ApiError(400, f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'} missing", param=names[0])


def _unknown(param: str) -> ApiError:
    """Return the error for a field that the server does not have, or only with some values."""
    if param in CHAT_FIELDS:
        return ApiError(400, f"{param}: only chats support it; send messages to /v1/chat/completions", param=param)
    message = f"there is no parameter {param}"
    if param in HARMLESS:
        message = f"{param} can only be {' or '.join(map(json.dumps, HARMLESS[param]))}"
    if param in REPLACEMENTS:
        message += f"; send {REPLACEMENTS[param]}"
    return ApiError(400, message, param=param, code="unknown_parameter")


def _path_of(error: Any) -> list[str]:
    """Return the names and indices that lead to a field; [] for the body."""
    # pydantic adds the names of the types that it tried to the path; they are not part of the request.
    return [str(part) for part in error["loc"][1:] if not TYPE_NAME.match(str(part))]


def _either_type(path: list[str], errors: Sequence[Any]) -> tuple[str, str] | None:
    """Return the parameter of several possible types that a path leads to or into, and what it must be."""
    for depth, name in enumerate(path, 1):
        # pydantic reports an error for each type that it tried.
        if name in EITHER_TYPE and [_path_of(error)[:depth] for error in errors].count(path[:depth]) > 1:
            return ".".join(path[:depth]), EITHER_TYPE[name]
    return None


def _encodable(text: str) -> str:
    """Escape lone surrogates, which JSON strings can contain but UTF-8 cannot encode."""
    return text.encode("utf-8", "backslashreplace").decode()
