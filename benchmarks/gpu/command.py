"""Command line of the benchmark and of the process of each part."""

from __future__ import annotations

import argparse
from pathlib import Path

from benchmarks.gpu.bench import SCALES, Setting
from benchmarks.gpu.parts import PARTS
from benchmarks.gpu.shapes import SHAPES
from benchmarks.support.command import new_parser
from engine.commands.options import ATTENTIONS
from engine.models.loader import DTYPES

TRACE = Path("../shared/traces/agent-tau-airline-gpt4o.npz")
RESULTS = Path("benchmarks/results")
PAGE = Path("docs/gpu.md")


def build_parser(description: str | None = None) -> argparse.ArgumentParser:
    """Return the parser with all options."""
    parser = new_parser("gpu", description)
    add = parser.add_argument
    add("--list", action="store_true", help="list what would run, and stop")
    add("--part", action="append", choices=[part.name for part in PARTS], help="run only this part; may be repeated")
    add("--device", choices=("cuda", "cpu"), default="cuda", help="cuda")
    add("--dtype", choices=DTYPES, default="bfloat16", help="bfloat16")
    add(
        "--attention",
        choices=ATTENTIONS,
        default="auto",
        help="attention backend (auto: FlashInfer, if installed)",
    )
    add(
        "--in-flight",
        type=int,
        choices=(0, 1),
        help="largest number of steps in flight when the next one is launched (1); on a CPU, 1 uses the graph executor",
    )
    add("--shape", choices=SHAPES, default="llama3-8b", help="shape of the random weights (llama3-8b)")
    add("--scale", choices=SCALES, default="full", help="amount of work: tiny tries the benchmark (full)")
    add("--trace", type=Path, default=TRACE, metavar="FILE", help=f"recorded traffic, .npz ({TRACE})")
    add("--time", type=float, default=1.0, metavar="FACTOR", help="multiplies every part's time limit (1)")
    add("--commit", help="commit in the results; otherwise git's")
    add("--out", type=Path, metavar="FILE", help=f"results; otherwise {RESULTS}/gpu-DATE.json, and {PAGE} is updated")
    add("--page", type=Path, nargs="+", metavar="FILE", help=f"update {PAGE} from these results, and stop")
    return parser


def setting_of(options: argparse.Namespace) -> Setting:
    """Return the setting of the parts."""
    scale = SCALES[options.scale]
    return Setting(
        options.device, options.dtype, options.attention, options.shape, scale, options.trace, options.in_flight
    )


def child_arguments(options: argparse.Namespace) -> list[str]:
    """Return the command line of a part's process, without `--part`."""
    names = ("device", "dtype", "attention", "in_flight", "shape", "scale", "trace")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return [word for name, value in given.items() for word in (f"--{name.replace('_', '-')}", str(value))]
