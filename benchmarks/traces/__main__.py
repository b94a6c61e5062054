"""Make recorded traffic from public repositories.

    python -m benchmarks.traces fetch all [--folder build/traces]

Downloads the files that `benchmarks/traces/manifest.json` names, with the licences of their repositories, encodes them
with published vocabularies, and checks the result against the manifest. An interrupted download is continued by the
same command. Needs the package tiktoken.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn
from rich.table import Table

from benchmarks.traces.download import DownloadError
from benchmarks.traces.fetching import fetch, remote_files
from benchmarks.traces.manifest import MANIFEST, Manifest, load_manifest

FOLDER = Path("build/traces")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the traces that the command line names; return 1 if one failed or differs from the manifest."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    manifest = load_manifest(options.manifest)
    names = list(manifest.traces) if "all" in options.name else options.name
    if unknown := [name for name in names if name not in manifest.traces]:
        parser.error(f"unknown trace {', '.join(unknown)}; known are {', '.join(manifest.traces)}")
    if not find_spec("tiktoken"):
        parser.error("tiktoken is not installed: pip install tiktoken")
    outcomes = fetch_all(manifest, names, options)
    print_outcomes(manifest, outcomes, options.folder)
    return 0 if all(is_right for is_right, _ in outcomes.values()) else 1


def fetch_all(manifest: Manifest, names: Sequence[str], options: argparse.Namespace) -> dict[str, tuple[bool, str]]:
    """Fetch traces one after another; return for each whether it equals the manifest, and what happened."""
    options.folder.mkdir(parents=True, exist_ok=True)
    outcomes = {}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as progress:
        for name in names:
            size = sum(remote.size for remote, _ in remote_files(manifest, name, options.folder))
            bar = progress.add_task(name, total=size)
            try:
                differences = fetch(
                    manifest, name, options.folder, options.mirror, lambda count, bar=bar: progress.advance(bar, count)
                )
            except (DownloadError, ValueError) as error:
                outcomes[name] = False, f"failed: {error}"
                continue
            text = f"differs from the manifest: {'; '.join(differences)}" if differences else "as in the manifest"
            outcomes[name] = not differences, text
    return outcomes


def print_outcomes(manifest: Manifest, outcomes: dict[str, tuple[bool, str]], folder: Path) -> None:
    """Print a table of the traces and what happened."""
    table = Table("trace", "source", "licence", "requests", "prompt tokens", "output tokens", "result")
    for name, (_, text) in outcomes.items():
        source = manifest.traces[name]
        counts = (f"{count:,}" for count in (source.requests, source.prompt_tokens, source.output_tokens))
        table.add_row(name, f"{source.repository} @{source.commit[:8]}", source.licence, *counts, text)
    console = Console(width=None if sys.stdout.isatty() else 250)
    console.print(table)
    console.print(f"Licences are in {folder / 'licences'}; they apply to the traces and vocabularies.")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.traces", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_subparsers(required=True).add_parser("fetch", help="download and convert traces").add_argument
    add("name", nargs="+", metavar="NAME|all", help=f"traces: {', '.join(load_manifest().traces)}")
    add("--folder", type=Path, default=FOLDER, help=f"where traces are written ({FOLDER})")
    add("--mirror", metavar="URL", help="copy of the sources; a file's address follows as HOST/PATH")
    add("--manifest", type=Path, default=MANIFEST, help="another list of sources")
    return parser


if __name__ == "__main__":
    sys.exit(main())
