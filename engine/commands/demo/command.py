"""`ssd-engine demo`, which `make run` runs: a comparison of `ssd-remote` with no drafts, while its corpus grows."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape

from drafter_service.client.chat_template import load_chat_template
from drafter_service.observability.measuring.results import prepare
from drafter_service.observability.measuring.rounds import alternated
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.commands.compare.compare import files_of, print_report, write_reports
from engine.commands.compare.results import Comparison, Condition
from engine.commands.compare.rows import Row
from engine.commands.compare.trial import BASELINE, Trial, Turn, Workload
from engine.commands.demo.outputs import find_lengths
from engine.commands.demo.results import Round, loop_share, result_of, results_of
from engine.commands.demo.tasks import make_tasks
from engine.commands.demo.workload import EXACT_SHARE, NEAR_SHARE, WorkItem, make_workload, most_requests
from engine.commands.options import EngineOptions
from engine.commands.progress import LongProgress
from engine.commands.prompts import read_texts
from engine.commands.reports import made_with
from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.decoder import Decoder
from engine.models.folders import find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import PROMPTS_FILE
from engine.models.tokenizer import ChatPrompts, Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.drafter import SuffixDrafter
from ssd.errors import UserError

NAME = "run"
"""Name of the files, without their endings."""
PROBE_REQUESTS = 8
PROBE_TASKS = 2
MIN_REQUESTS, MAX_REQUESTS = 120, 300
"""Bounds of the number of requests: fewer make a tenth of the workload too small, more show nothing new."""
WORKLOAD_S = 150.0
"""Target duration of the requests in seconds; with start-up, the run takes about three minutes."""
SIDECAR_OPTIONS = ("--capacity", "1M")
LENGTHS_CONFIG = EngineConfig(max_sequences=16)
"""Settings of the untimed run that finds where outputs end."""
DRAFTER = Row("ssd-remote", "ssd-remote", {"deadline_s": "0.25"}, 0, False, "path")
"""Its deadline is so long that a stalled machine causes a slow step and not a missing draft."""
Cases = Sequence[Callable[[list[Request]], Turn]]
"""Functions that run requests without and with drafts."""
NOTES = (
    "Each request runs alone, once without drafts and once with them; the corpus of the sidecar starts empty.",
    "tokens per step: all draft tokens that the sidecar sends are verified.",
    "speed-up here: time of the requests without drafts / time with them.",
)


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


def requests_of(
    items: Sequence[WorkItem], model: Decoder, tokenizer: Tokenizer, sampling: SamplingParams
) -> list[Request]:
    """Return the requests of `items`, each with `max_tokens` set to where its output ends.

    A chat model ends the outputs of tasks itself.
    """

    def request(item: WorkItem) -> Request:
        # The chat template has rendered the special tokens of tasks.
        prompt = tokenizer.encode(item.prompt, add_special_tokens=not item.task)
        return Request(prompt, replace(sampling, seed=item.seed))

    if items[0].task:
        return [request(item) for item in items]
    # Exact repeats have the same output.
    unique = {(item.prompt, item.seed): request(item) for item in items}
    # The drafter only speeds this up; the timed engines have their own caches and drafters.
    with closing(build_engine(model, LENGTHS_CONFIG, SuffixDrafter(DrafterConfig()))) as engine:
        lengths = find_lengths(engine, tokenizer, list(unique.values()), [prompt for prompt, _ in unique])
    ended = {
        key: replace(request, sampling=replace(request.sampling, max_tokens=length))
        for (key, request), length in zip(unique.items(), lengths, strict=True)
    }
    return [ended[item.prompt, item.seed] for item in items]


def run_rounds(
    cases: Cases, items: Sequence[WorkItem], requests: Sequence[Request], check: Callable[[], None], console: Console
) -> list[Round]:
    """Run requests without and with drafts in alternation; `check` is called after each."""
    rounds: list[Round] = []
    condition = Condition("exact", 0, 1)
    with LongProgress(console, len(items)) as progress:
        turns = alternated(dict(enumerate(cases)), ([request] for request in requests))
        for item, turn in zip(items, turns, strict=True):
            rounds.append(Round(item, turn[0], turn[1]))
            check()
            recent = result_of("", rounds[-max(10, len(items) // 10) :], condition, "path", 0)
            progress.advance(1, f"{recent.tokens_per_s:,.0f} tokens/s, {recent.speedup:.2f}x")
    return rounds


def demonstrate(options: DemoOptions) -> bool:
    """Run the workload without and with drafts, write the report, and return whether all outputs were identical.

    Raises UserError.
    """
    prepare(options.out, files_of(NAME))
    console = Console()
    folder = find_model(options.model)
    tokenizer = Tokenizer(folder)
    prompts, tasks = _read_workload(folder, tokenizer, options)
    model = pack(load_model(folder))
    sampling = SamplingParams(options.max_tokens, options.temperature)
    condition = Condition("exact", options.temperature, 1)
    lost: list[str] = []

    def check() -> None:
        if lost:
            raise UserError(f"{lost[0]}; the figures would be wrong, so run again")

    with running_sidecar(*SIDECAR_OPTIONS) as sidecar:
        engines = EngineOptions(
            folder, "cpu", "auto", "auto", "none", {}, {}, sidecar.address, None, EngineConfig(max_sequences=1)
        )
        trial = Trial(model, tokenizer, engines, Workload((), (), options.max_tokens), lost.append, lambda *_: None)
        with trial.running([BASELINE, DRAFTER], condition, verifies_all=True) as cases:
            probes = [WorkItem("new", prompt, seed=0) for prompt in prompts[:PROBE_REQUESTS]] or tasks[:PROBE_TASKS]
            began = time.perf_counter()
            # These requests, which also warm up both engines, stay out of the corpus and of the prefix cache.
            for request in requests_of(probes, model, tokenizer, sampling):
                for run in cases:
                    run([replace(request, learn=False, salt="probe")])
            seconds = (time.perf_counter() - began) / len(probes)
            count = len(tasks) or options.requests or choose_requests(seconds, len(prompts))
            console.print(_introduction(folder.name, tasks, count, seconds))
            items = tasks or make_workload(prompts, count, options.seed)
            with console.status("finding where each output ends (not timed)"):
                requests = requests_of(items, model, tokenizer, sampling)
            rounds = run_rounds(cases, items, requests, check, console)
    settings: dict[str, object] = {**asdict(options), "model": folder.name, "requests": count, "drafter": DRAFTER.name}
    del settings["out"]
    comparison = _comparison(rounds, condition, settings, engines.config.max_draft)
    write_reports(comparison, options.out, NAME)
    print_report(comparison, console)
    for task, tokens in {each.item.task: each.drafted.completions[0].content for each in rounds}.items():
        if task:
            console.print(f"[bold]the last output of {task}:[/]\n{escape(tokenizer.decode(tokens))}", soft_wrap=True)
    console.print(f"wrote {', '.join(files_of(NAME))} into {options.out}", markup=False)
    return comparison.is_exact


def _comparison(
    rounds: Sequence[Round], condition: Condition, settings: dict[str, object], max_draft: int
) -> Comparison:
    results = results_of(rounds, condition, DRAFTER.shape, max_draft)
    whole, new = results[0], next((result for result in results if result.drafter == "new"), results[0])
    conclusion = (
        f"{whole.speedup:.2f}x the tokens/s of none over {whole.prompts} requests, {new.speedup:.2f}x over the "
        f"{new.prompts} new ones among them; {whole.tokens_per_step:.2f} and {new.tokens_per_step:.2f} tokens per step."
    )
    differing = [str(number) for number, each in enumerate(rounds, 1) if not each.is_same]
    notes = [*NOTES, f"{loop_share(rounds):.0%} of the output tokens are part of loops, which any drafter predicts."]
    notes += [f"Outputs differ in requests {', '.join(differing)}."] if differing else []
    return Comparison(settings, None, None, made_with(), results, conclusion=conclusion, notes=notes)


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


def _introduction(model: str, items: Sequence[WorkItem], count: int, seconds: float) -> str:
    kinds = (
        "edits of code, quotes from a text, answers in JSON and turns of an agent, none of which repeats"
        if items
        else f"{EXACT_SHARE:.0%} exact repeats, {NEAR_SHARE:.0%} near repeats, the rest new; an output ends at the end "
        "of its function, before a repeated line, or within an overlong line"
    )
    return (
        f"{count} requests go to [bold]{escape(model)}[/] one at a time: {kinds}.\nEach is run both without drafts and "
        f"with a sidecar that starts empty. The first ones took {seconds:.2f} s each, so the run takes about "
        f"{count * seconds / 60:.1f} minutes."
    )
