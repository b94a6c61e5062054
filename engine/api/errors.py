"""Errors in the form of OpenAI's API."""

from __future__ import annotations

from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

NAMES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
}


class ApiError(Exception):
    """A request that gets an error for an answer."""

    def __init__(self, status: int, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code = status, message, param, code


def body_of(status: int, message: str, param: str | None = None, code: str | None = None) -> dict[str, object]:
    """The JSON of an error."""
    name = NAMES.get(status, "rate_limit_error" if status == 429 else "server_error" if status >= 500 else NAMES[400])
    return {"error": {"message": message, "type": name, "param": param, "code": code}}


def response_of(error: ApiError) -> JSONResponse:
    """The answer that says it."""
    headers = {401: {"WWW-Authenticate": "Bearer"}, 429: {"Retry-After": "1"}, 503: {"Retry-After": "5"}}
    return JSONResponse(
        body_of(error.status, error.message, error.param, error.code), error.status, headers.get(error.status)
    )


def from_validation(problem: RequestValidationError) -> ApiError:
    """The first thing that is wrong with a body."""
    first = problem.errors()[0]
    # Which of several possible types was tried is of no interest to who sent none of them.
    path = [str(part) for part in first["loc"][1:] if not (isinstance(part, str) and _is_type(part))]
    param = ".".join(path) or None
    if first["type"] == "json_invalid":
        return ApiError(400, f"the body is not JSON: {first['ctx']['error']}")
    if first["type"] == "extra_forbidden":
        return ApiError(400, f"there is no parameter {param}", param=param, code="unknown_parameter")
    what = first["msg"].removeprefix("Value error, ")
    return ApiError(400, f"{param}: {what}" if param else what, param=param)


def _is_type(part: str) -> bool:
    return part in ("str", "int", "float", "bool") or part.startswith(("list[", "constrained-", "function-"))
