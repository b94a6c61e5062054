"""The schema of reports is shipped, and describes every field."""

import json
from pathlib import Path

from drafter_service.observability.report.schema import SCHEMA_VERSION, schema_json

SHIPPED = Path(__file__).parents[4] / "docs" / "report.schema.json"


def test_shipped_schema_is_current():
    assert SHIPPED.read_text() == schema_json(), (
        "stale; run: python -m drafter_service.observability.report.schema > docs/report.schema.json"
    )


def descriptions():
    """Return the description of each field, or of the part that the field contains."""
    schema = json.loads(schema_json())
    parts = {"Report": schema, **schema["$defs"]}

    def description(field):
        return field.get("description") or parts[field["$ref"].removeprefix("#/$defs/")]["description"]

    return {
        f"{part}.{name}": description(field)
        for part, known in parts.items()
        for name, field in known["properties"].items()
    }


def test_every_field_has_a_description_with_its_unit():
    assert len(descriptions()) > 100
    assert json.loads(schema_json())["properties"]["schema_version"]["const"] == SCHEMA_VERSION
    assert [field for field, words in descriptions().items() if len(words) < 5] == []
    units = {"_s": "second", "_bytes": "in bytes", "_at": "seconds since 1970", "tokens": "token"}
    for field, words in descriptions().items():
        for ending, unit in units.items():
            if field.endswith(ending):
                assert unit in words.lower(), field
