"""`ssd-engine demo`, which `make run` runs: choose the number of requests, run them, and write the report."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from drafter_service.client import DrafterClient
from drafter_service.client.chat_template import load_chat_template
from drafter_service.observability.measuring.results import prepare
from drafter_service.observability.measuring.sidecar import running_sidecar
from drafter_service.observability.pages.tables import console_table
from engine.commands.demo.measure import Measurement, Part, Summary, measure, summarize
from engine.commands.demo.outputs import find_lengths
from engine.commands.demo.report import COLUMNS, JSON_FILE, PAGE_FILE, table_rows, write_report
from engine.commands.demo.tasks import make_tasks
from engine.commands.demo.workload import EXACT_SHARE, NEAR_SHARE, WorkItem, make_workload, most_requests
from engine.commands.progress import LongProgress
from engine.commands.prompts import read_texts
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.chat import ChatPrompts
from engine.models.decoder import Decoder
from engine.models.hub import find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Completion, Request, SamplingParams
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from ssd.errors import UserError

PROBE_REQUESTS = 8
PROBE_TASKS = 2
MIN_REQUESTS, MAX_REQUESTS = 120, 300
"""Bounds of the number of requests: fewer make a tenth of the workload too small, more show nothing new."""
WORKLOAD_S = 150.0
"""Target duration of the requests in seconds; with start-up, the run takes about three minutes."""
STEP_DEADLINE_S = 0.25
"""Long, so that a stalled machine causes a slow step and not a missing draft."""
SIDECAR_OPTIONS = ("--capacity", "1M")
LENGTHS_CONFIG = EngineConfig(max_sequences=16)
"""Settings of the untimed run that finds where outputs end."""


@dataclass(frozen=True)
class DemoOptions:
    """Arguments of the command line; see its help."""

    out: Path
    requests: int | None
    """None: chosen by the speed of the machine."""
    max_tokens: int
    temperature: float
    seed: int
    model: Path | None


class EnginePair:
    """The engines without and with drafts over one model, and the requests that both run."""

    def __init__(self, model: Decoder, tokenizer: Tokenizer, sampling: SamplingParams, client: DrafterClient) -> None:
        self.client = client
        self.plain = build_engine(model, EngineConfig(max_sequences=1), NoDrafter())
        self.drafting = build_engine(model, EngineConfig(max_sequences=1), client)
        self._model = model
        self._tokenizer = tokenizer
        self._sampling = sampling
        self.samples: dict[str, str] = {}
        """The last output of each kind of task."""

    def requests(self, items: Sequence[WorkItem]) -> list[Request]:
        """Return the requests of `items`, each with `max_tokens` set to where its output ends.

        A chat model ends the outputs of tasks itself.
        """
        if items[0].task:
            return [self._request(item) for item in items]
        # Exact repeats have the same output.
        unique = {(item.prompt, item.seed): self._request(item) for item in items}
        # The drafter only speeds this up; the timed engines have their own caches and drafters.
        with closing(build_engine(self._model, LENGTHS_CONFIG, SuffixDrafter(DrafterConfig()))) as engine:
            prompts = [prompt for prompt, _ in unique]
            lengths = find_lengths(engine, self._tokenizer, list(unique.values()), prompts)
        ended = {
            key: replace(request, sampling=replace(request.sampling, max_tokens=length))
            for (key, request), length in zip(unique.items(), lengths, strict=True)
        }
        return [ended[item.prompt, item.seed] for item in items]

    def probe(self, items: Sequence[WorkItem]) -> float:
        """Return the mean seconds per request, including the search for its end; also warms up both engines."""
        began = time.perf_counter()
        # Keep these requests out of the corpus and of the prefix cache of later requests.
        requests = [replace(request, learn=False, salt="probe") for request in self.requests(items)]
        measure(items, requests, self.plain, self.drafting, 0)
        return (time.perf_counter() - began) / len(items)

    def run(self, items: Sequence[WorkItem], requests: Sequence[Request], console: Console) -> list[Measurement]:
        """Run the workload with a progress bar. Raises UserError if the sidecar is lost: the figures would be wrong."""
        recent: list[Measurement] = []
        with LongProgress(console, len(items)) as progress:

            def observe(measurement: Measurement, completion: Completion) -> None:
                recent.append(measurement)
                self.samples[measurement.task] = self._tokenizer.decode(completion.content)
                part = Part.of(recent[-max(10, len(items) // 10) :])
                rates = f"{part.plain_tokens_per_s:,.0f} -> {part.drafted_tokens_per_s:,.0f} tokens/s"
                progress.advance(1, f"{rates}, {part.speedup:.2f}x")
                if self.client.lost is not None:
                    raise UserError(f"the sidecar was lost during the run ({self.client.lost}); run again")

            learned_prompt_tokens = DrafterConfig().learned_prompt_tokens
            return measure(items, requests, self.plain, self.drafting, learned_prompt_tokens, observe)

    def _request(self, item: WorkItem) -> Request:
        # The chat template has rendered the special tokens of tasks.
        prompt = self._tokenizer.encode(item.prompt, add_special_tokens=not item.task)
        return Request(prompt, replace(self._sampling, seed=item.seed))


def demonstrate(options: DemoOptions) -> bool:
    """Run the workload without and with drafts, write the report, and return whether all outputs were identical.

    Raises UserError.
    """
    prepare(options.out, (JSON_FILE, PAGE_FILE))
    console = Console()
    folder = find_model(options.model)
    tokenizer = Tokenizer(folder)
    prompts, tasks = _read_workload(folder, tokenizer, options)
    model = pack(load_model(folder))
    sampling = SamplingParams(options.max_tokens, options.temperature)
    with running_sidecar(*SIDECAR_OPTIONS) as sidecar:
        pair = EnginePair(model, tokenizer, sampling, DrafterClient(sidecar.address, deadline_s=STEP_DEADLINE_S))
        with closing(pair.drafting):
            probes = [WorkItem("new", prompt, seed=0) for prompt in prompts[:PROBE_REQUESTS]]
            seconds = pair.probe(probes or tasks[:PROBE_TASKS])
            count = len(tasks) or options.requests or choose_requests(seconds, len(prompts))
            introduce = _introduce_tasks if tasks else _introduction
            console.print(introduce(folder.name, count, seconds, options.requests is None))
            items = tasks or make_workload(prompts, count, options.seed)
            with console.status("finding where each output ends (not timed)"):
                requests = pair.requests(items)
            measurements = pair.run(items, requests, console)
            late_steps = pair.client.counters.timeouts
    summary = summarize(measurements)
    settings: dict[str, object] = {**asdict(options), "model": folder.name, "requests": count, "late_steps": late_steps}
    write_report(summary, measurements, {name: settings[name] for name in settings if name != "out"}, options.out)
    _print_summary(summary, console)
    for task in summary.tasks:
        console.print(f"[bold]the last output of {task}:[/]\n{escape(pair.samples[task])}", soft_wrap=True)
    console.print(f"wrote {options.out / JSON_FILE} and {options.out / PAGE_FILE}", markup=False)
    return summary.identical


def _read_workload(folder: Path, tokenizer: Tokenizer, options: DemoOptions) -> tuple[list[str], list[WorkItem]]:
    """Return prompts of functions to complete, or tasks for a chat model whose folder has no such prompts.

    Raises UserError if the model can do neither, and for too few prompts.
    """
    if (folder / PROMPTS_FILE).exists():
        prompts = read_texts(folder / PROMPTS_FILE)
        if options.requests is not None:
            make_workload(prompts, options.requests, options.seed)  # Fails here if there are too few prompts.
        return prompts, []
    if load_chat_template(folder) is None:
        raise UserError(f"{folder} has neither a {PROMPTS_FILE}, with functions to complete, nor a chat template")
    return [], make_tasks(ChatPrompts(folder, tokenizer), options.seed)[: options.requests]


def choose_requests(seconds: float, prompts: int) -> int:
    """Return the number of requests of `seconds` each that fit into `WORKLOAD_S`, within the bounds."""
    return min(most_requests(prompts), max(MIN_REQUESTS, min(MAX_REQUESTS, int(WORKLOAD_S / seconds))))


def _introduction(model: str, count: int, seconds: float, is_chosen: bool) -> str:
    reason = f"The first {PROBE_REQUESTS} requests took {seconds:.2f} s each, so {count} are run" if is_chosen else ""
    bound = f" (never fewer than {MIN_REQUESTS})" if is_chosen and count == MIN_REQUESTS else ""
    return (
        f"{reason or f'{count} requests are run'}{bound}: about {count * seconds / 60:.1f} minutes.\n"
        f"They go to [bold]{escape(model)}[/] one at a time: {EXACT_SHARE:.0%} exact repeats, {NEAR_SHARE:.0%} near "
        "repeats, the rest new. Each is run both without drafts and with a sidecar that starts empty.\n"
        "An output ends at the end of its function, before a repeated line, or within an overlong line."
    )


def _introduce_tasks(model: str, count: int, seconds: float, _: bool) -> str:
    return (
        f"{count} tasks go to [bold]{escape(model)}[/] one at a time: edits of code, quotes from a text, answers in "
        "JSON and turns of an agent, none of which repeats. Each is run both without drafts and with a sidecar that "
        f"starts empty. The first {PROBE_TASKS} took {seconds:.1f} s each, so the run takes about "
        f"{count * seconds / 60:.1f} minutes."
    )


def _print_summary(summary: Summary, console: Console) -> None:
    console.print(
        console_table(COLUMNS, *table_rows(summary), title="by tenth of the workload, and by kind of request")
    )
    for part, name in ((summary.whole, "requests"), (summary.kinds["new"], "new ones among them")):
        rates = f"[bold]{part.speedup:.2f}x[/] tokens/s, {part.tokens_per_step:.2f} tokens per step"
        console.print(f"{part.requests} {name}: {rates}")
    console.print(f"share of loops in the output: {summary.loop_share:.0%}")
    console.print(
        "outputs: [bold green]identical[/], token by token"
        if summary.identical
        else f"outputs: [bold red]DIFFERENT[/] in requests {', '.join(map(str, summary.differing))}"
    )
