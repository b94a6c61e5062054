"""The speed-up that `ssd-drafter advise` predicts, next to the measured one.

    python -m benchmarks.advice [--concurrency 1,16] [--requests 120] [--max-tokens 128] [--rounds 3]

In each round the cost profile of the shipped model is measured, and the engine runs the requests of the demo without
and with drafts; the order alternates. The requests and their outputs are then a log, for which `advise` predicts the
speed-up of the same drafts with the profile of each round. Figures are medians over the rounds:

    measured    tokens per second with drafts, divided by those without
    predicted   by `advise`
    ratio       predicted divided by measured, of the same round

The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.replay import list_of, positive
from benchmarks.traces import Request, Trace
from drafter_service.commands.advise.reading import LogFacts
from drafter_service.commands.advise.traffic import Traffic
from engine.commands.openmp import limit_spinning
from ssd.budget.cost_profile import CostProfile

if TYPE_CHECKING:
    from benchmarks.support.serving import Run
    from drafter_service.commands.advise.advice import Advice
    from drafter_service.commands.advise.trials import Outcome, Trial

MAX_DRAFT = 16
"""Maximum length of the engine's drafts."""
COLUMNS = ("concurrency", "measured", "predicted", "ratio", "tokens_per_step", "predicted_tokens_per_step")


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, predict, and print the table and the document."""
    options = build_parser().parse_args(arguments)
    limit_spinning(os.environ)
    # PyTorch takes seconds to import.
    from benchmarks.engine import build_parser as engine_parser
    from benchmarks.support.engine_comparison import prepare, run_rounds

    concurrency = ",".join(map(str, options.concurrency))
    given = ["--no-peers", "--concurrency", concurrency]
    given += ["--requests", str(options.requests), "--max-tokens", str(options.max_tokens)]
    comparison, cases, notes = prepare(engine_parser().parse_args(given))
    found: dict[int, list[dict[str, float]]] = {count: [] for count in options.concurrency}
    for number in range(options.rounds):
        profile = measured_profile(concurrency)
        runs = run_rounds(comparison, cases if number % 2 == 0 else cases[::-1], 1)
        for count, rows in found.items():
            [plain], [drafted] = runs["none", count], runs["ssd", count]
            traffic = traffic_of([item.request.prompt for item in comparison.items], plain.outputs)
            rows.append(figures(plain, drafted, predict(traffic, profile, count)))
    rows = [{"concurrency": count, **medians(each)} for count, each in found.items()]
    table = Table(*(name.replace("_", " ") for name in COLUMNS))
    for row in rows:
        table.add_row(*(f"{row[name]:.4g}" for name in COLUMNS))
    console = Console()
    for note in notes:
        console.print(note, markup=False)
    console.print(table)
    print(json.dumps({"results": rows, "rounds": found, "settings": vars(options), "load": os.getloadavg()[0]}))


def measured_profile(concurrency: str) -> CostProfile:
    """Return the profile that `ssd-engine profile` writes for the shipped model."""
    from engine.commands.main import cli

    with TemporaryDirectory() as folder:
        path = Path(folder) / "profile.json"
        arguments = ["profile", "--drafter", "ngram", "--concurrency", concurrency, "--out", str(path)]
        cli(arguments, standalone_mode=False)
        return CostProfile.read(path)


def traffic_of(prompts: Sequence[np.ndarray], outputs: Sequence[np.ndarray]) -> Traffic:
    """Return requests as `advise` reads them from a log without times."""
    texts = [np.concatenate(pair).astype(np.uint32) for pair in zip(prompts, outputs, strict=True)]
    return Trace("", [Request(text, len(prompt), -1) for text, prompt in zip(texts, prompts, strict=True)]).traffic()


def predict(traffic: Traffic, profile: CostProfile, concurrency: int) -> Advice:
    """Return the advice for a number of requests at once."""
    from drafter_service.commands.advise.advice import advise, plan_samples, plan_whole
    from drafter_service.commands.advise.trials import run_trials

    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokens"
        traffic.tokens.tofile(path)

        def run(trials: list[Trial]) -> list[Outcome]:
            return run_trials(traffic, path, profile, trials, lambda _tokens: None)

        samples = run(plan_samples(traffic, profile, concurrency))
        [whole] = run([plan_whole(traffic, concurrency, samples)])
        return advise(traffic, LogFacts(), profile, samples, whole, concurrency)


def figures(plain: Run, drafted: Run, advice: Advice) -> dict[str, float]:
    """Return the figures of a round; the engine drafts paths of up to 16 tokens."""
    [same] = [one for one in advice.lengths if (one.draft_shape, one.max_draft) == ("path", MAX_DRAFT)]
    measured = plain.seconds / drafted.seconds * drafted.tokens / plain.tokens
    return {
        "measured": measured,
        "predicted": same.speedup,
        "ratio": same.speedup / measured,
        "tokens_per_step": drafted.tokens / drafted.deliveries,
        "predicted_tokens_per_step": same.tokens_per_step,
    }


def medians(rounds: Sequence[dict[str, float]]) -> dict[str, float]:
    """Return the median of each figure."""
    return {name: median(each[name] for each in rounds) for name in rounds[0]}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.advice", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add: Any = parser.add_argument
    add("--concurrency", type=list_of(positive), default=[1, 16], help="requests that run at once (1,16)")
    add("--requests", type=positive, default=120, metavar="N", help="120")
    add("--max-tokens", type=positive, default=128, metavar="N", help="per output (128)")
    add("--rounds", type=positive, default=3, metavar="N", help="3")
    return parser


if __name__ == "__main__":
    main()
