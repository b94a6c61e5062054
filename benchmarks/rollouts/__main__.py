"""Train the shipped model twice with GRPO, without and with drafts: `python -m benchmarks.rollouts`.

The trainer is TRL's GRPOTrainer; this project's engine generates the rollouts, and gets the new weights before each
step. The problems are functions of the standard library to complete, and the reward is computed from the completed
function. The first run takes half of --minutes; the second one makes the same number of steps. Drafts are verified
exactly, so tokens, rewards, losses and final weights of both runs must be equal bit for bit.

With --engines 2, two engine processes share a sidecar. The results are written to --out, and are the last line of the
output. The exit code is 1 if a target was missed.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.rollouts.problems import Settings
from benchmarks.support import Row, new_parser, report, say, target
from drafter_service.observability.measuring.results import machine
from drafter_service.observability.pages.tables import markdown_table

if TYPE_CHECKING:
    from benchmarks.rollouts.training import Run, Step

START_S = 20.0
"""Time of a run before its first step and after its last one."""
LARGEST_RATIO = 0.7
"""Time of rollouts with drafts divided by the time without, to reach in the last third of the steps."""


def main(arguments: list[str] | None = None) -> None:
    """Train twice and print the results."""
    parser = new_parser("rollouts", __doc__)
    usual, add = Settings(), parser.add_argument
    add("--minutes", type=float, default=10.0, help="time of both runs (10)")
    add("--steps", type=int, metavar="N", help="training steps of each run, in place of --minutes")
    add("--problems", type=int, default=usual.problems, metavar="N", help=f"{usual.problems}")
    add("--samples", type=int, default=usual.samples, metavar="N", help=f"outputs for each problem ({usual.samples})")
    add("--max-tokens", type=int, default=usual.max_tokens, metavar="N", help=f"per output ({usual.max_tokens})")
    add("--engines", type=int, default=1, metavar="N", help="engine processes (1: in the trainer's process)")
    add("--drafter", metavar="NAME", help="ssd, and ssd-remote for several engines; none: only the run without drafts")
    add("--trace", type=Path, metavar="FILE", help="write the rollouts as recorded traffic, .npz")
    parser.set_defaults(out=Path("build/rollouts/rollouts.json"))
    options = parser.parse_args(arguments)
    try:
        settings = Settings(
            problems=options.problems,
            samples=options.samples,
            max_tokens=options.max_tokens,
            engines=options.engines,
        )
    except ValueError as error:
        parser.error(str(error))
    drafter = options.drafter or ("ssd" if settings.engines == 1 else "ssd-remote")

    from benchmarks.rollouts.engines import running_engines
    from benchmarks.rollouts.training import train

    folder = options.out.parent
    with running_engines(settings, "none") as engines:
        plain = train(settings, engines, "none", folder, options.steps, options.minutes * 60 / 2 - START_S)
    if options.trace:
        write_trace(options.trace, plain.steps, settings)
        say(f"wrote {options.trace}")
    if drafter == "none":
        return
    with running_engines(settings, drafter) as engines:
        drafted = train(settings, engines, drafter, folder, len(plain.steps))
    document = {**machine(), "settings": asdict(settings), "drafter": drafter, **compared(plain, drafted)}
    heads = [name for name in document["steps"][0] if name != "share_of_accepted"]
    print(markdown_table(heads, [[f"{row[head]:.4g}" for head in heads] for row in document["steps"]]))
    for text in document["differences"]:
        say(text)
    report(document, options.out)


def compared(plain: Run, drafted: Run) -> dict[str, Any]:
    """Return steps, the comparison of the runs and the targets."""
    last = slice(-max(1, len(plain.steps) // 3), None)
    ratios = {
        name: sum(getattr(step, field) for step in drafted.steps[last])
        / sum(getattr(step, field) for step in plain.steps[last])
        for name, field in (("ratio", "rollout_s"), ("cpu_ratio", "cpu_s"))
    }
    found = differences(plain, drafted)
    return {
        "differences": found,
        "weights": drafted.weights,
        **ratios,
        "seconds": {"without": plain.seconds, "with": drafted.seconds},
        "steps": [step_row(*pair) for pair in zip(plain.steps, drafted.steps, strict=False)],
        "targets": [
            target("results that differ between the runs", len(found), "at most", 0),
            target("rollout seconds with drafts / without, last third", ratios["ratio"], "at most", LARGEST_RATIO),
        ],
    }


def step_row(plain: Step, drafted: Step) -> Row:
    """Return the figures of a step without and with drafts; shares are of the accepted tokens, by source."""
    from engine.drafters.sources import sum_by_name

    counts = sum_by_name(each.by_source for each in drafted.completions)
    accepted = sum(each.accepted for each in counts.values())
    return {
        "reward": float(np.mean(plain.rewards)),
        "loss": float(np.mean(plain.losses)),
        "output_tokens": plain.tokens,
        "without_s": plain.rollout_s,
        "with_s": drafted.rollout_s,
        "without_cpu_s": plain.cpu_s,
        "with_cpu_s": drafted.cpu_s,
        "update_s": drafted.update_s,
        "tokens_per_step": drafted.tokens / drafted.verify_steps,
        "drafted": sum(each.drafted for each in counts.values()),
        "accepted": accepted,
        "share_of_accepted": {name: each.accepted / max(1, accepted) for name, each in counts.items()},
    }


def differences(first: Run, second: Run) -> list[str]:
    """Return a sentence for each kind of result in which two runs differ; empty if they are equal bit for bit."""
    found = []
    if len(first.steps) != len(second.steps):
        found.append(f"one run has {len(first.steps)} steps, the other {len(second.steps)}")
    for name in ("outputs", "rewards", "losses"):
        pairs = zip(first.steps, second.steps, strict=False)
        steps = [number for number, (one, other) in enumerate(pairs) if getattr(one, name) != getattr(other, name)]
        if steps:
            found.append(f"{name} differ in {len(steps)} of {len(first.steps)} steps, first in step {steps[0]}")
    if first.weights != second.weights:
        found.append("the final weights differ")
    return found


def write_trace(path: Path, steps: list[Step], settings: Settings) -> None:
    """Write the rollouts as recorded traffic, see `ssd.replay.Recording.load`.

    `group` is the number of the problem, and `version` the training step.
    """
    rows, tokens = [], []
    for version, step in enumerate(steps):
        groups = np.repeat(range(settings.problems), settings.samples).tolist()
        for group, prompt, output in zip(groups, step.prompts, step.outputs, strict=True):
            rows.append((len(prompt), len(output), len(rows), group, version))
            tokens += [*prompt, *output]
    names = ("prompt_len", "output_len", "session", "group", "version")
    columns = dict(zip(names, np.array(rows, np.int32).T, strict=True))
    np.savez_compressed(path, tokens=np.array(tokens, np.uint32), **columns)


if __name__ == "__main__":
    main()
