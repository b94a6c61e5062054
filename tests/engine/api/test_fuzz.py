"""Requests generated from the server's OpenAPI description, and odd ones, never cause a server error."""

import json

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis import GenerationMode
from schemathesis.checks import not_a_server_error

from tests.engine.api.serving import MODEL, TIMEOUT_S


@pytest.fixture(scope="module", autouse=True)
def working_server(server):
    """Check after a test that the server still works and that no page is in use."""
    yield
    payload = {"model": MODEL, "prompt": "x", "max_tokens": 3}
    assert server.http.post("/v1/completions", json=payload).status_code == 200
    assert server.http.get("/figures").json()["kv_usage"] == 0


@pytest.fixture(scope="module")
def description(server):
    return schemathesis.openapi.from_dict(server.http.get("/openapi.json").json())


ROUTES = [
    ("/v1/completions", "POST"),
    ("/v1/chat/completions", "POST"),
    ("/v1/weights", "POST"),
    ("/v1/models", "GET"),
    ("/v1/models/{name}", "GET"),
    ("/health", "GET"),
    ("/metrics", "GET"),
]


def test_every_route_is_fuzzed(description):
    described = {(path, method.upper()) for path in description for method in description[path]}
    assert described == set(ROUTES)


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["allowed", "forbidden"])
@pytest.mark.parametrize(("path", "method"), ROUTES)
def test_requests_that_the_description_allows_or_forbids(server, description, path, method, mode):
    operation = description[path][method]
    if mode is GenerationMode.NEGATIVE and method == "GET":
        pytest.skip("has no body that could be wrong")

    @settings(
        max_examples=settings().max_examples // 4,
        suppress_health_check=list(HealthCheck),
        database=None,
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def fuzz(case):
        if isinstance(case.body, dict) and path != "/v1/weights":
            case.body.update(model=MODEL, max_tokens=2)  # reaches checks beyond the model name
        response = case.call(base_url=server.url, timeout=TIMEOUT_S, headers=dict(server.http.headers))
        case.validate_response(response, checks=(not_a_server_error,))
        if response.status_code >= 400:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    fuzz()


JSON = {"Content-Type": "application/json"}
ODD = st.sampled_from(
    [
        1e308, -1e308, 1e-38, float("nan"), float("inf"), 10**400, -1, 0, 1.5, True, "", "\ud800", "\x00", [], {}, [[]],
        [""], "1",
    ]
)  # fmt: skip
FIELDS = (
    "temperature", "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty",
    "logit_bias", "seed", "n", "stop", "stop_token_ids", "min_tokens", "stream", "stream_options", "user",
    "max_draft", "logprobs", "echo", "prompt", "model", "max_tokens", "best_of", "\ud800", "response_format",
)  # fmt: skip


@given(odd=st.dictionaries(st.sampled_from(FIELDS), ODD, max_size=3))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_odd_values_get_a_response(http, odd):
    body = json.dumps({"model": MODEL, "prompt": "x", "max_tokens": 2} | odd).encode()
    response = http.post("/v1/completions", content=body, headers=JSON)
    assert response.status_code in (200, 400, 404), (odd, response.text)
    if response.status_code != 200:
        assert response.json()["error"]["message"]


def test_lone_surrogates_in_user_and_stop_are_accepted(http):
    body = b'{"model": "stdlib-7m", "prompt": "x", "max_tokens": 2, "user": "\\ud800", "stop": ["\\udfff"]}'
    assert http.post("/v1/completions", content=body, headers=JSON).status_code == 200
