"""`ssd-engine demo`: what `make run` runs."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console

from engine.build import SHIPPED_MODEL
from engine.demo.run import run_demo, write_report
from engine.demo.workload import EXACT_SHARE, NEAR_SHARE, make_workload, read_prompts
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.request import SamplingParams
from engine.tokenizer import Tokenizer

PROMPTS_FILE = "prompts.jsonl"


def demonstrate(out: Path, requests: int, max_tokens: int, seed: int, model_folder: Path | None) -> bool:
    """Run the workload both ways and report; returns whether all outputs were identical. Raises UserError."""
    console = Console()
    folder = model_folder or SHIPPED_MODEL
    model = pack(load_model(folder))
    tokenizer = Tokenizer(folder)
    items = make_workload(read_prompts(folder / PROMPTS_FILE), requests, seed)
    console.print(
        f"{requests} requests to [bold]{folder.name}[/], one at a time, at most {max_tokens} new tokens each: "
        f"{EXACT_SHARE:.0%} exact repeats, {NEAR_SHARE:.0%} near repeats, the rest new.\n"
        "Each runs without drafts and with a sidecar that starts empty, in turns."
    )
    measurements, late_steps = run_demo(model, tokenizer, items, SamplingParams(max_tokens=max_tokens), console)
    settings: dict[str, object] = {
        "model": folder.name,
        "requests": requests,
        "max_tokens": max_tokens,
        "seed": seed,
        "late_steps": late_steps,
    }
    summary = write_report(measurements, out, settings, console)
    last = summary.last_tenth
    console.print(
        f"last tenth: [bold]{last.speedup:.2f}x[/] tokens/s, {last.tokens_per_step:.2f} tokens per step; "
        f"{summary.loop_share:.0%} of the output is a loop"
    )
    console.print(
        "outputs: [bold green]identical[/], token by token"
        if summary.identical
        else f"outputs: [bold red]DIFFERENT[/] in requests {', '.join(map(str, summary.differing))}"
    )
    console.print(f"wrote {out / 'run.json'} and {out / 'run.html'}")
    return summary.identical
