"""Read `manifest.json`: the files to download and the traces to convert them to, with digests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.traces.conversion import Arrays, Limits, digest

MANIFEST = Path(__file__).with_name("manifest.json")
REPOSITORIES = "https://raw.githubusercontent.com"


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    sha256: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class VocabularySource:
    """The published ranks of a vocabulary."""

    ranks: Remote
    licence: str
    notice: Remote
    """Text of the licence."""


@dataclass(frozen=True)
class TraceSource:
    """Files of a repository at one commit, and the trace that they must be converted to."""

    repository: str
    commit: str
    licence: str
    notice: Remote
    """Text of the licence."""
    format: str
    """Key of `formats.FORMATS`."""
    vocabulary: str
    limits: Limits
    files: dict[str, Remote]
    """Files by path in the repository, in the order that the format expects."""
    requests: int
    prompt_tokens: int
    output_tokens: int
    digests: dict[str, str]
    """SHA-256 of each array; the arrays are in order of arrival."""
    teaches: bool
    """Whether the start values that are shipped were learned from it, see `benchmarks.priors`."""

    def differences(self, arrays: Arrays) -> list[str]:
        """Return in which respects arrays differ from the manifest; empty if they are the same."""
        counts = {
            "requests": (len(arrays["prompt_len"]), self.requests),
            "prompt tokens": (int(arrays["prompt_len"].sum()), self.prompt_tokens),
            "output tokens": (int(arrays["output_len"].sum()), self.output_tokens),
        }
        other_counts = [
            f"{found:,} {what}, not {wanted:,}" for what, (found, wanted) in counts.items() if found != wanted
        ]
        other_arrays = [name for name, wanted in self.digests.items() if digest(arrays[name]) != wanted]
        return other_counts + [f"array {name}" for name in other_arrays]


@dataclass(frozen=True)
class Manifest:
    """All sources by name."""

    vocabularies: dict[str, VocabularySource]
    traces: dict[str, TraceSource]


def load_manifest(path: Path = MANIFEST) -> Manifest:
    """Read a manifest."""
    document = json.loads(path.read_text())
    return Manifest(
        {name: _vocabulary(entry) for name, entry in document["vocabularies"].items()},
        {name: _trace(entry) for name, entry in document["traces"].items()},
    )


def _vocabulary(entry: Mapping[str, Any]) -> VocabularySource:
    ranks, notice = (_remote(entry[key]["url"], entry[key]) for key in ("ranks", "notice"))
    return VocabularySource(ranks, entry["licence"], notice)


def _trace(entry: Mapping[str, Any]) -> TraceSource:
    base = f"{REPOSITORIES}/{entry['repository']}/{entry['commit']}"
    same = ("repository", "commit", "licence", "format", "vocabulary", "requests", "prompt_tokens", "output_tokens")
    ((notice_path, notice),) = entry["notice"].items()
    return TraceSource(
        **{key: entry[key] for key in same},
        notice=_remote(f"{base}/{notice_path}", notice),
        limits=Limits(**entry.get("cut_from", {})),
        files={path: _remote(f"{base}/{path}", file) for path, file in entry["files"].items()},
        digests=entry["digests"],
        teaches=entry.get("teaches", True),
    )


def _remote(url: str, entry: Mapping[str, Any]) -> Remote:
    return Remote(url, entry["sha256"], entry["bytes"])
