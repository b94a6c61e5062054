"""Fields of a request's body become the sampling parameters of its requests."""

from types import SimpleNamespace

import numpy as np
import pytest

from engine.api.schemas import CompletionRequest
from engine.api.service import Service
from tests.engine.api.serving import MODEL


@pytest.mark.parametrize("verification", ["exact", "rejection", None])
def test_a_request_chooses_its_verification(verification):
    service = SimpleNamespace(served=SimpleNamespace(defaults={}))
    body = CompletionRequest(model=MODEL, prompt="x", verification=verification, n=2)
    requests = Service.requests(service, body, np.array([5], np.uint32), max_tokens=3)
    assert [request.sampling.verification for request in requests] == [verification] * 2


def test_verification_is_accepted_and_checked_by_the_server(http):
    asked = {"model": MODEL, "prompt": "x", "max_tokens": 2, "temperature": 1}
    assert http.post("/v1/completions", json=asked | {"verification": "rejection"}).status_code == 200
    answer = http.post("/v1/completions", json=asked | {"verification": "greedy"})
    assert answer.status_code == 400
    assert "verification" in answer.json()["error"]["message"]
