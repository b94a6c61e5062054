"""Recorded traffic of public repositories: the table of sources, their formats, and the conversion to recordings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

MANIFEST = Path(__file__).with_name("manifest.json")


def load_manifest(path: Path = MANIFEST) -> dict[str, dict[str, Any]]:
    """Read the sources of a manifest, by the name of the trace.

    A source has the `repository` and its `commit`, the `licence` and the file with its text (`notice`); the `files`
    that are converted, with their SHA-256, in the order that the `format` (a key of `formats.FORMATS`) expects; the
    `vocabulary` with its `name` (a key of `conversion.VOCABULARIES`) and downloads; `cut_from` (see `Limits`); what the
    trace must be (counts and `digests` of its arrays); and `teaches`: whether `benchmarks.priors` learns from it.
    """
    document = json.loads(path.read_text())
    sources = {}
    for name, entry in document["traces"].items():
        vocabulary = {"name": entry["vocabulary"], **document["vocabularies"][entry["vocabulary"]]}
        sources[name] = {"teaches": True, **entry, "vocabulary": vocabulary}
    return sources
