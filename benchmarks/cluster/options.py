"""Options of the command lines that run the cluster."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from benchmarks.cluster.topology import Settings

HOSTS = Path("build/hosts")


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose the engines."""
    parser.add_argument("--engine", choices=("ssd", "vllm"), help="default: vllm if --hosts exists, else ssd")
    parser.add_argument("--hosts", type=Path, default=HOSTS, help=f"virtual environment with vLLM ({HOSTS})")


def settings_of(options: argparse.Namespace, **others: Any) -> Settings:
    """Return the settings of the cluster from the options of the command line, which has --out too.

    others: further fields of the settings. Raises SystemExit if vLLM is chosen and not installed.
    """
    python = options.hosts / "bin" / "python"
    kind = options.engine or ("vllm" if python.exists() else "ssd")
    if kind == "vllm" and not python.exists():
        raise SystemExit(f"there is no {python}; run `make hosts`, or choose --engine ssd")
    return Settings(kind, python.absolute(), (options.out / "logs").absolute(), **others)
