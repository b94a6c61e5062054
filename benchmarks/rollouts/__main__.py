"""Train the shipped model twice with GRPO, without and with drafts: `python -m benchmarks.rollouts`.

The trainer is TRL's GRPOTrainer; this project's engine generates the rollouts, and gets the new weights before each
step. The problems are functions of the standard library to complete, and the reward is computed from the completed
function. The first run takes half of --minutes; the second one makes the same number of steps. Drafts are verified
exactly, so tokens, rewards, losses and final weights of both runs must be equal bit for bit.

With --engines 2, two engine processes share a sidecar. The page rollouts.html and the document rollouts.json are
written to --out; the document is also the last line of the output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from benchmarks.rollouts.problems import Settings
from benchmarks.support.command import new_parser

START_S = 20.0
"""Time of a run before its first step and after its last one."""


def main(arguments: list[str] | None = None) -> None:
    """Train twice and print the results."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    try:
        settings = Settings(
            problems=options.problems,
            problems_per_step=min(options.problems, options.per_step),
            samples=options.samples,
            max_tokens=options.max_tokens,
            engines=options.engines,
        )
    except ValueError as error:
        parser.error(str(error))
    drafter = options.drafter or ("ssd" if settings.engines == 1 else "ssd-remote")

    from benchmarks.rollouts.engines import running_engines
    from benchmarks.rollouts.runs import document, render_page, write_trace
    from benchmarks.rollouts.training import train
    from benchmarks.support.targets import conclude
    from drafter_service.observability.measuring.results import machine

    options.out.mkdir(parents=True, exist_ok=True)
    with running_engines(settings, "none") as engines:
        plain = train(settings, engines, "none", options.out, options.steps, options.minutes * 60 / 2 - START_S)
    if options.trace:
        write_trace(options.trace, plain.steps, settings)
        print(f"wrote {options.trace}", file=sys.stderr, flush=True)
    if drafter == "none":
        return
    with running_engines(settings, drafter) as engines:
        drafted = train(settings, engines, drafter, options.out, len(plain.steps))
    result = document(settings, plain, drafted) | machine()
    for text in result["differences"]:
        print(text, file=sys.stderr, flush=True)
    conclude("rollouts", result, render_page(result), options.out)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = new_parser("rollouts", __doc__)
    usual, add = Settings(), parser.add_argument
    add("--minutes", type=float, default=10.0, help="time of both runs (10)")
    add("--steps", type=int, metavar="N", help="training steps of each run, in place of --minutes")
    add("--problems", type=int, default=usual.problems, metavar="N", help=f"{usual.problems}")
    add("--per-step", type=int, default=usual.problems_per_step, metavar="N", help="problems of a training step (16)")
    add("--samples", type=int, default=usual.samples, metavar="N", help=f"outputs for each problem ({usual.samples})")
    add("--max-tokens", type=int, default=usual.max_tokens, metavar="N", help=f"per output ({usual.max_tokens})")
    add(
        "--engines", type=int, default=usual.engines, metavar="N", help="engine processes (1: in the trainer's process)"
    )
    add("--drafter", metavar="NAME", help="ssd, and ssd-remote for several engines; none: only the run without drafts")
    add("--trace", type=Path, metavar="FILE", help="write the rollouts as recorded traffic, .npz")
    add("--out", type=Path, default=Path("build/rollouts"), help="folder for the results")
    return parser


if __name__ == "__main__":
    main()
