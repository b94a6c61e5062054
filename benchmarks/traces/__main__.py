"""Make recorded traffic from public repositories.

    python -m benchmarks.traces fetch all [--folder build/traces]

Downloads the files that `benchmarks/traces/manifest.json` names, with the licences of their repositories, encodes them
with published vocabularies, and checks the result against the manifest. After an interruption the same command
continues with the next file. Needs the package tiktoken.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.support.command import new_parser
from benchmarks.traces.fetching import MANIFEST, DownloadError, fetch, load_manifest

FOLDER = Path("build/traces")
HEADS = ("trace", "source", "licence", "requests", "prompt tokens", "output tokens", "result")


def main(arguments: Sequence[str] | None = None) -> int:
    """Fetch the traces that the command line names; return 1 if one failed or differs from the manifest."""
    parser = new_parser("traces", __doc__)
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
    options.folder.mkdir(parents=True, exist_ok=True)
    table, is_right = Table(*HEADS), True
    for name in names:
        source = sources[name]
        size = sum(remote.size for remote in source.remotes.values())
        print(f"{name}: {size / 1e6:.1f} MB ...", file=sys.stderr, flush=True)
        try:
            differences = fetch(name, source, options.folder, options.mirror)
            result = f"differs from the manifest: {'; '.join(differences)}" if differences else "as in the manifest"
            is_right &= not differences
        except (DownloadError, ValueError) as error:
            result, is_right = f"failed: {error}", False
        counts = (f"{count:,}" for count in (source.requests, source.prompt_tokens, source.output_tokens))
        table.add_row(name, f"{source.repository} @{source.commit[:8]}", source.licence, *counts, result)
    console = Console(width=None if sys.stdout.isatty() else 250)
    console.print(table)
    console.print(f"Licences are in {options.folder / 'licences'}; they apply to the traces and vocabularies.")
    return 0 if is_right else 1


if __name__ == "__main__":
    sys.exit(main())
