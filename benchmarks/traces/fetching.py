"""Make traces from public repositories: download the files of `manifest.json`, convert them, and check the result."""

from __future__ import annotations

import hashlib
import http.client
import json
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np

from benchmarks.traces.conversion import VOCABULARIES, Arrays, ChatEncoder, Limits, convert, digest, load_encoder
from benchmarks.traces.formats import FORMATS

MANIFEST = Path(__file__).with_name("manifest.json")
REPOSITORIES = "https://raw.githubusercontent.com"
TRIES = 3
TIMEOUT_S = 30


@dataclass(frozen=True)
class Remote:
    """A file to download."""

    url: str
    sha256: str
    size: int
    """Bytes."""


@dataclass(frozen=True)
class Source:
    """Files of a repository at one commit, and the trace that they must be converted to."""

    repository: str
    commit: str
    licence: str
    format: str
    """Key of `formats.FORMATS`."""
    vocabulary: str
    """Key of `conversion.VOCABULARIES`."""
    limits: Limits
    inputs: dict[str, str]
    """Places in the folder of traces of the files that are converted, by path in the repository, in the order that the
    format expects.
    """
    remotes: dict[str, Remote]
    """All files by their places in the folder of traces; the texts of licences come first."""
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


class DownloadError(Exception):
    """A file could not be downloaded, or is not the expected one."""


def load_manifest(path: Path = MANIFEST) -> dict[str, Source]:
    """Read the sources of a manifest, by the name of the trace."""
    document = json.loads(path.read_text())
    return {name: _source(name, entry, document["vocabularies"]) for name, entry in document["traces"].items()}


def _source(name: str, entry: dict[str, Any], vocabularies: dict[str, Any]) -> Source:
    base = f"{REPOSITORIES}/{entry['repository']}/{entry['commit']}"
    ((notice_path, notice),) = entry["notice"].items()
    vocabulary = vocabularies[entry["vocabulary"]]
    inputs = {path: f"sources/{name}/{path}" for path in entry["files"]}
    same = ("repository", "commit", "licence", "format", "vocabulary", "requests", "prompt_tokens", "output_tokens")
    return Source(
        **{key: entry[key] for key in (*same, "digests")},
        limits=Limits(**entry.get("cut_from", {})),
        inputs=inputs,
        remotes={
            f"licences/{name}.txt": _remote(f"{base}/{notice_path}", notice),
            f"licences/{entry['vocabulary']}.txt": _remote(vocabulary["notice"]["url"], vocabulary["notice"]),
            ranks_of(entry["vocabulary"]): _remote(vocabulary["ranks"]["url"], vocabulary["ranks"]),
            **{inputs[path]: _remote(f"{base}/{path}", file) for path, file in entry["files"].items()},
        },
        teaches=entry.get("teaches", True),
    )


def _remote(url: str, entry: dict[str, Any]) -> Remote:
    return Remote(url, entry["sha256"], entry["bytes"])


def ranks_of(vocabulary: str) -> str:
    """Return the place of a vocabulary's ranks in the folder of traces."""
    return f"sources/{vocabulary}.ranks"


def fetch(
    name: str,
    source: Source,
    folder: Path,
    mirror: str | None = None,
    encoder_of: Callable[[str, Path], Any] = load_encoder,
) -> list[str]:
    """Write the trace NAME.npz into `folder`, and return in which respects it differs from the manifest.

    A trace that is there and equals the manifest is kept. Raises DownloadError, and ValueError for files that cannot be
    converted.
    """
    result = folder / f"{name}.npz"
    if result.exists():
        with np.load(result) as file:
            if not source.differences(dict(file)):
                return []
    for place, remote in source.remotes.items():
        download(remote, folder / place, mirror)
    texts = {path: (folder / place).read_text(encoding="utf-8") for path, place in source.inputs.items()}
    encoder = encoder_of(source.vocabulary, folder / ranks_of(source.vocabulary))
    chats = ChatEncoder(VOCABULARIES[source.vocabulary], encoder)
    try:
        arrays = convert(FORMATS[source.format](texts), chats, source.limits)
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"the files of {name} are not in the format {source.format}: {error!r}") from error
    part = result.with_name(f"{name}.part.npz")
    np.savez_compressed(part, **arrays)
    part.replace(result)
    return source.differences(arrays)


def download(remote: Remote, path: Path, mirror: str | None) -> None:
    """Download a file to `path` unless it is there.

    mirror: base URL of a copy of the hosts, in which a file's address follows as HOST/PATH. Raises DownloadError.
    """
    if path.exists() and _sha256(path.read_bytes()) == remote.sha256:
        return
    parts = urlsplit(remote.url)
    host = f"{parts.scheme}://{parts.netloc}" if mirror is None else f"{mirror.rstrip('/')}/{parts.netloc}"
    url = host + quote(parts.path)
    content = _read(url)
    if (found := _sha256(content)) != remote.sha256:
        raise DownloadError(f"{url} is another file than expected: its SHA-256 is {found}, not {remote.sha256}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def _read(url: str) -> bytes:
    """Return the content of a file. Raises DownloadError, after several tries if the connection is lost."""
    reason = ""
    for _ in range(TRIES):
        try:
            with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
                return answer.read()
        except urllib.error.HTTPError as error:
            raise DownloadError(f"{url}: {error}") from None
        except (OSError, http.client.HTTPException) as error:
            reason = str(error)
    raise DownloadError(f"{url}: {reason}; the same command continues with this file")


def _sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
