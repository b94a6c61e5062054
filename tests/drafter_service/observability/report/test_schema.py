"""The schema of reports: shipped as it is, and saying what each field means."""

import json
from pathlib import Path

import pytest

from drafter_service.observability.report.schema import SCHEMA_VERSION, Report, schema_json

SHIPPED = Path(__file__).parents[4] / "docs" / "report.schema.json"


def test_the_shipped_schema_is_current():
    assert SHIPPED.read_text() == schema_json(), (
        "stale; run: python -m drafter_service.observability.report.schema > docs/report.schema.json"
    )


def descriptions():
    """What is said of each field; of one that is a part of its own, what is said of that."""
    schema = json.loads(schema_json())
    parts = {"Report": schema, **schema["$defs"]}

    def said(field):
        return field.get("description") or parts[field["$ref"].removeprefix("#/$defs/")]["description"]

    return {
        f"{part}.{name}": said(field) for part, known in parts.items() for name, field in known["properties"].items()
    }


def test_every_field_says_what_it_is():
    assert len(descriptions()) > 100
    assert [field for field, says in descriptions().items() if len(says) < 5] == []


def test_every_time_size_and_count_has_its_unit():
    units = {"_s": "second", "_bytes": "in bytes", "_at": "seconds since 1970", "tokens": "token"}
    for field, says in descriptions().items():
        for ending, unit in units.items():
            if field.endswith(ending):
                assert unit in says.lower(), field


def test_the_version_is_that_of_the_document():
    assert json.loads(schema_json())["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    with pytest.raises(ValueError, match="schema_version"):
        Report.model_validate({"schema_version": SCHEMA_VERSION + 1})
