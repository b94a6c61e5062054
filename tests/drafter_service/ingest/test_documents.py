"""Times, users and sessions in the forms that logs have."""

import pytest

from drafter_service.ingest.documents import Origin, origin_of

MOMENT = 1_700_000_000.0


@pytest.mark.parametrize(
    "value",
    [MOMENT, MOMENT * 1e3, MOMENT * 1e6, MOMENT * 1e9, "2023-11-14T22:13:20Z", "2023-11-14 22:13:20", str(MOMENT)],
)
def test_times_are_seconds_since_the_epoch(value):
    assert origin_of({"timestamp": value}).began_s == pytest.approx(MOMENT)


@pytest.mark.parametrize("value", [True, -1, "yesterday", [], float("nan"), {}, "0001-01-01T00:00:00Z"])
def test_other_values_are_no_times(value):
    assert origin_of({"timestamp": value}).began_s is None


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"created": 10, "end_time": 14}, Origin(10, 14)),
        ({"created": 10, "latency_ms": 2500}, Origin(10, 12.5)),
        ({"request": {"user": "u"}, "response": {"created": 3}}, Origin(3, user="u")),
        ({"request": {"metadata": {"session_id": 7}}}, Origin(session="7")),
        ({"metadata": {"user_id": "a"}}, Origin(user="a")),
        ({"startTime": 10, "endTime": 14, "userId": "u", "traceId": "t"}, Origin(10, 14, "u", "t")),
        ({"timestamp": 10, "type": "assistant", "sessionId": "s"}, Origin(10, session="s")),
        ({"latency": 3}, Origin()),
        ({"user": ""}, Origin()),
        ("text", Origin()),
    ],
)  # fmt: skip
def test_fields_are_found_in_a_record_its_request_and_its_response(record, expected):
    assert origin_of(record) == expected
