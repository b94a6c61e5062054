"""Error messages for invalid bodies."""

import pytest
from fastapi.exceptions import RequestValidationError
from pydantic import ValidationError

from engine.api.errors import from_validation
from engine.api.schemas import ChatRequest, CompletionRequest


@pytest.mark.parametrize(
    ("field", "param", "message"),
    [
        # Fields of several possible types: the message is about the type that was sent.
        ({"stop": ["a"] * 65}, "stop", "at most 64 items"),
        ({"prompt": []}, "prompt", "at least 1 item"),
        ({"prompt": [[]]}, "prompt.0", "at least 1 item"),
        ({"prompt": [-1]}, "prompt.0", "greater than or equal to 0"),
        ({"stop": 5}, "stop", "valid string"),
        ({"temperature": "hot"}, "temperature", "valid number"),
        ({"colour": 1}, "colour", "there is no parameter"),
    ],
)
def test_the_first_error_names_its_parameter(field, param, message):
    with pytest.raises(ValidationError) as caught:
        CompletionRequest.model_validate({"model": "m", "prompt": "x"} | field)
    found = [{**error, "loc": ("body", *error["loc"])} for error in caught.value.errors()]
    error = from_validation(RequestValidationError(found))
    assert (error.status, error.param) == (400, param)
    assert message in error.message


def test_unsupported_fields_are_refused_by_name():
    with pytest.raises(ValidationError) as caught:
        ChatRequest.model_validate({"model": "m", "messages": [{"role": "user", "content": "x"}], "tools": [{}]})
    [found] = caught.value.errors()
    error = from_validation(RequestValidationError([{**found, "loc": ("body", *found["loc"])}]))
    assert (error.status, error.param, error.message) == (400, "tools", "tools are not supported")
