"""Errors in the form of OpenAI's API."""

from __future__ import annotations

import re
from typing import Any

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

NAMES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}
BLAMED = re.compile(r"([a-z]+(?:_[a-z]+)*)(?::| must | holds | needs )")
"""How messages about a parameter begin."""
ALIASES = {"max_draft": "max_draft_tokens", "prompt_logprobs": "logprobs"}
"""What requests have other names for."""


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def body_of(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The JSON of an error."""
    name = NAMES.get(status, "rate_limit_error" if status == 429 else "server_error" if status >= 500 else NAMES[400])
    return {"error": {"message": _writable(message), "type": name, "param": param and _writable(param), "code": code}}


def response_of(error: ApiError) -> JSONResponse:
    """The answer that says it."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    return JSONResponse(
        body_of(error.status, error.message, error.param, error.code), error.status, headers.get(error.status)
    )


def refused(message: str, prompt: str) -> ApiError:
    """What the engine says against a request. prompt: what holds its prompt."""
    if message.startswith("the prompt"):
        return ApiError(400, message, param=prompt, code="context_length_exceeded" if "shorten" in message else None)
    if message.startswith("prompt and output"):
        return ApiError(400, message, param="max_tokens")
    found = BLAMED.match(message)
    return ApiError(400, message, param=ALIASES.get(found[1], found[1]) if found else None)


def from_validation(problem: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    errors = problem.errors()
    # Of several possible types, that of what was sent has something else against it than the type.
    place = errors[0]["loc"][:2]
    own = [error for error in errors if error["loc"][:2] == place and not error["type"].endswith("_type")]
    first = (own or errors)[0]
    # Which of several possible types was tried is of no interest to who sent none of them.
    path = [str(part) for part in first["loc"][1:] if not (isinstance(part, str) and _is_type(part))]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "model_attributes_type" and not path:
        # A body of another type, or of none, is not read as JSON.
        unread = isinstance(first["input"], bytes)
        return ApiError(
            400, "send the header Content-Type: application/json" if unread else "the body must be a JSON object"
        )
    if first["type"] == "too_long" and first["ctx"]["max_length"] == 0:
        return ApiError(400, f"{param} are not supported", param=param)
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"there is no parameter {param}", param=param, code="unknown_parameter")
    what = _what(first)
    if param is None and (found := BLAMED.match(what)):
        return ApiError(400, what, param=found[1])
    return ApiError(400, f"{param}: {what}" if param else what, param=param)


def _what(error: Any) -> str:
    if error["type"] == "literal_error":
        return f"this server supports only {error['ctx']['expected']}"
    return str(error["msg"]).removeprefix("Value error, ")


def _is_type(part: str) -> bool:
    return part in ("str", "int", "float", "bool", "ContentPart") or part.startswith(
        ("list[", "constrained-", "function-")
    )


def _writable(text: str) -> str:
    """JSON strings may hold halves of surrogate pairs, which no UTF-8 can say again."""
    return text.encode("utf-8", "backslashreplace").decode()
