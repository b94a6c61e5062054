"""Completions that the `generate` command wrote."""

import json

PROMPT = "def add(left, right):"


def records(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def completions(path):
    """Return the records without the figures of their drafts, which may differ between runs."""
    return [{name: value for name, value in record.items() if name != "draft"} for record in records(path)]
