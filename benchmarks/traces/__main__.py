"""Make recorded traffic from public repositories.

    python -m benchmarks.traces fetch all [--folder build/traces]

Downloads the files that `benchmarks/traces/manifest.json` names, with the licences of their repositories, encodes them
with published vocabularies, and checks the result against the manifest. After an interruption the same command
continues with the next file. Needs the package tiktoken.
"""

from __future__ import annotations

import hashlib
import http.client
import sys
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import numpy as np
from rich.console import Console

from benchmarks.support import new_parser, say
from benchmarks.traces import MANIFEST, load_manifest
from benchmarks.traces.conversion import VOCABULARIES, Arrays, ChatEncoder, Limits, convert, digest, load_encoder
from benchmarks.traces.formats import FORMATS
from drafter_service.observability.pages.tables import console_table

FOLDER = Path("build/traces")
HEADS = ("trace", "source", "licence", "requests", "prompt tokens", "output tokens", "result")
REPOSITORIES = "https://raw.githubusercontent.com"
TIMEOUT_S = 30

Entry = Mapping[str, Any]
"""A source of the manifest."""


class DownloadError(Exception):
    """A file could not be downloaded, or is not the expected one."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the traces that the command line names; return 1 if one failed or differs from the manifest."""
    parser = new_parser("traces", __doc__, has_results=False)
    add = parser.add_subparsers(required=True).add_parser("fetch", help="download and convert traces").add_argument
    add("name", nargs="+", metavar="NAME|all", help=f"traces: {', '.join(load_manifest())}")
    add("--folder", type=Path, default=FOLDER, help=f"where traces are written ({FOLDER})")
    add("--mirror", metavar="URL", help="copy of the sources; a file's address follows as HOST/PATH")
    add("--manifest", type=Path, default=MANIFEST, help="another list of sources")
    options = parser.parse_args(arguments)
    sources = load_manifest(options.manifest)
    names = list(sources) if "all" in options.name else options.name
    if unknown := [name for name in names if name not in sources]:
        parser.error(f"unknown trace {', '.join(unknown)}; known are {', '.join(sources)}")
    if not find_spec("tiktoken"):
        parser.error("tiktoken is not installed: pip install tiktoken")
    rows, is_right = [], True
    for name in names:
        entry = sources[name]
        say(f"{name} ...")
        try:
            found = fetch(name, entry, options.folder, options.mirror)
            result = f"differs from the manifest: {'; '.join(found)}" if found else "as in the manifest"
            is_right &= not found
        except (DownloadError, ValueError) as error:
            result, is_right = f"failed: {error}", False
        counts = (f"{entry[count]:,}" for count in ("requests", "prompt_tokens", "output_tokens"))
        rows.append((name, f"{entry['repository']} @{entry['commit'][:8]}", entry["licence"], *counts, result))
    console = Console(width=None if sys.stdout.isatty() else 250)
    console.print(console_table(HEADS, rows))
    console.print(f"Licences are in {options.folder / 'licences'}; they apply to the traces and vocabularies.")
    return 0 if is_right else 1


def fetch(
    name: str,
    entry: Entry,
    folder: Path,
    mirror: str | None = None,
    encoder_of: Callable[[str, Path], Any] = load_encoder,
) -> list[str]:
    """Write the trace NAME.npz into `folder`, and return in which respects it differs from the manifest.

    A trace that is there and equals the manifest is kept. mirror: base URL of a copy of the hosts, in which a file's
    address follows as HOST/PATH. Raises DownloadError, and ValueError for files that cannot be converted.
    """
    result = folder / f"{name}.npz"
    if result.exists():
        with np.load(result) as file:
            if not differences(entry, dict(file)):
                return []
    base, vocabulary = f"{REPOSITORIES}/{entry['repository']}/{entry['commit']}", entry["vocabulary"]
    ranks = folder / "sources" / f"{vocabulary['name']}.ranks"
    ((notice_path, notice),) = entry["notice"].items()
    download(f"{base}/{notice_path}", notice, folder / "licences" / f"{name}.txt", mirror)
    for path, known in ((folder / "licences" / f"{vocabulary['name']}.txt", "notice"), (ranks, "ranks")):
        download(vocabulary[known]["url"], vocabulary[known]["sha256"], path, mirror)
    texts = {
        path: download(f"{base}/{path}", sha256, folder / "sources" / name / path, mirror).decode()
        for path, sha256 in entry["files"].items()
    }
    chats = ChatEncoder(VOCABULARIES[vocabulary["name"]], encoder_of(vocabulary["name"], ranks))
    try:
        arrays = convert(FORMATS[entry["format"]](texts), chats, Limits(**entry.get("cut_from", {})))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise ValueError(f"the files of {name} are not in the format {entry['format']}: {error!r}") from error
    part = result.with_name(f"{name}.part.npz")
    np.savez_compressed(part, **arrays)
    part.replace(result)
    return differences(entry, arrays)


def differences(entry: Entry, arrays: Arrays) -> list[str]:
    """Return in which respects arrays differ from the manifest; empty if they are the same."""
    counts = {
        "requests": len(arrays["prompt_len"]),
        "prompt_tokens": int(arrays["prompt_len"].sum()),
        "output_tokens": int(arrays["output_len"].sum()),
    }
    others = [f"{found:,} {name}, not {entry[name]:,}" for name, found in counts.items() if found != entry[name]]
    return others + [f"array {name}" for name, wanted in entry["digests"].items() if digest(arrays[name]) != wanted]


def download(url: str, sha256: str, path: Path, mirror: str | None) -> bytes:
    """Download a file to `path` unless it is there, and return its content. Raises DownloadError."""
    if path.exists() and hashlib.sha256(content := path.read_bytes()).hexdigest() == sha256:
        return content
    parts = urlsplit(url)
    host = f"{parts.scheme}://{parts.netloc}" if mirror is None else f"{mirror.rstrip('/')}/{parts.netloc}"
    url = host + quote(parts.path)
    content = _read(url)
    if (found := hashlib.sha256(content).hexdigest()) != sha256:
        raise DownloadError(f"{url} is another file than expected: its SHA-256 is {found}, not {sha256}")
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)
    return content


def _read(url: str) -> bytes:
    """Return the content of a file. Raises DownloadError."""
    try:
        with urllib.request.urlopen(url, timeout=TIMEOUT_S) as answer:
            return answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise DownloadError(f"{url}: {error}; the same command continues with this file") from None


if __name__ == "__main__":
    sys.exit(main())
