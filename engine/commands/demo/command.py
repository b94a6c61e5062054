"""`ssd-engine demo`: what `make run` runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from engine.commands.demo.run import prepare_report, run_demo, write_report
from engine.commands.demo.workload import EXACT_SHARE, NEAR_SHARE, make_workload, read_prompts
from engine.models.hub import find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import PROMPTS_FILE, SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import SamplingParams


@dataclass(frozen=True)
class DemoOptions:
    """What the command line asked for; see its help."""

    out: Path
    requests: int
    max_tokens: int
    temperature: float
    seed: int
    model: Path | None


def demonstrate(options: DemoOptions) -> bool:
    """Run the workload both ways and report; returns whether all outputs were identical. Raises UserError."""
    prepare_report(options.out)
    console = Console()
    folder = find_model(options.model) if options.model else SHIPPED_MODEL
    model = pack(load_model(folder))
    tokenizer = Tokenizer(folder)
    items = make_workload(read_prompts(folder / PROMPTS_FILE), options.requests, options.seed)
    sampling = SamplingParams(options.max_tokens, options.temperature)
    console.print(
        f"{options.requests} requests to [bold]{escape(folder.name)}[/], one at a time, "
        f"at most {options.max_tokens} new tokens each: "
        f"{EXACT_SHARE:.0%} exact repeats, {NEAR_SHARE:.0%} near repeats, the rest new.\n"
        "Each runs without drafts and with a sidecar that starts empty, in turns."
    )
    measurements, late_steps = run_demo(model, tokenizer, items, sampling, console)
    settings: dict[str, object] = {
        "model": folder.name,
        "requests": options.requests,
        "max_tokens": options.max_tokens,
        "temperature": options.temperature,
        "seed": options.seed,
        "late_steps": late_steps,
    }
    summary = write_report(measurements, options.out, settings, console)
    for name, part in (("requests", summary.last_tenth), ("new ones among them", summary.last_tenth_new)):
        if part is not None:
            rates = f"[bold]{part.speedup:.2f}x[/] tokens/s, {part.tokens_per_step:.2f} tokens per step"
            console.print(f"last tenth, {part.requests} {name}: {rates}")
    console.print(f"output that is a loop: {summary.loop_share:.0%}")
    console.print(
        "outputs: [bold green]identical[/], token by token"
        if summary.identical
        else f"outputs: [bold red]DIFFERENT[/] in requests {', '.join(map(str, summary.differing))}"
    )
    console.print(f"wrote {options.out / 'run.json'} and {options.out / 'run.html'}", markup=False)
    return summary.identical
