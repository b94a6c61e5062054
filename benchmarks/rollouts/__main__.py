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
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.rollouts.problems import Settings
from benchmarks.support.command import new_parser

if TYPE_CHECKING:
    from benchmarks.rollouts.runs import Run

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

    def log(text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    from benchmarks.rollouts.runs import document, render_page, write_trace
    from benchmarks.support.targets import conclude
    from drafter_service.observability.measuring.results import machine

    options.out.mkdir(parents=True, exist_ok=True)
    seconds = options.minutes * 60 / 2 - START_S
    plain = run_once(settings, "none", options.out, limit(options.steps, seconds), log)
    if options.trace:
        write_trace(options.trace, plain.steps, settings)
        log(f"wrote {options.trace}")
    if drafter == "none":
        return
    drafted = run_once(settings, drafter, options.out, limit(len(plain.steps), None), log)
    result = document(settings, plain, drafted) | machine()
    for text in result["differences"]:
        log(text)
    conclude("rollouts", result, render_page(result), options.out)


def limit(steps: int | None, seconds: float | None) -> Callable[[Run], bool]:
    """Return whether a run has made its last step: after a number of steps, or after a time."""
    began = time.monotonic()

    def is_last(run: Run) -> bool:
        return len(run.steps) >= steps if steps is not None else time.monotonic() - began >= (seconds or 0.0)

    return is_last


def run_once(
    settings: Settings, drafter: str, out: Path, is_last: Callable[[Run], bool], log: Callable[[str], None]
) -> Run:
    """Train with one drafter, and log each step."""
    from benchmarks.rollouts.engines import running_engines
    from benchmarks.rollouts.training import train

    def watch(run: Run) -> bool:
        step = run.steps[-1]
        reward, rate = sum(step.rewards) / len(step.rewards), step.tokens / step.verify_steps
        log(
            f"{drafter}, step {len(run.steps) - 1}: reward {reward:.3f}, {step.tokens:,} tokens in "
            f"{step.rollout_s:.2f} s ({step.cpu_s:.2f} s of processor time), {rate:.2f} tokens per step"
        )
        return is_last(run)

    with running_engines(settings, drafter) as engines:
        return train(settings, engines, drafter, out, watch)


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
