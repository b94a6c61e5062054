"""`ssd-engine demo`, which `make run` runs: a comparison of `ssd-remote` with no drafts, while its corpus grows."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
from rich.console import Console
from rich.markup import escape

from drafter_service.client.chat_template import load_chat_template
from drafter_service.observability.measuring.results import prepare
from drafter_service.observability.measuring.rounds import alternated
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.commands.compare.compare import files_of, made_with, report
from engine.commands.compare.results import Comparison, Condition, Figures, Result, find_loops
from engine.commands.compare.rows import Row
from engine.commands.compare.trial import BASELINE, Trial, Turn, Workload
from engine.commands.compare.workload import (
    EXACT_SHARE,
    KINDS,
    NEAR_SHARE,
    WorkItem,
    find_lengths,
    make_tasks,
    make_workload,
)
from engine.commands.options import DemoFlags, EngineOptions
from engine.commands.progress import LongProgress
from engine.commands.prompts import read_texts
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
PARTS = 10
SIDECAR_OPTIONS = ("--capacity", "1M")
LENGTHS_CONFIG = EngineConfig(max_sequences=16)
"""Settings of the untimed run that finds where outputs end."""
DRAFTER = Row("ssd-remote", "ssd-remote", {"deadline_s": "0.25"}, EngineConfig.max_draft, False, "path")
"""Its deadline is so long that a stalled machine causes a slow step and not a missing draft."""
FUNCTIONS = (
    f"Requests: {EXACT_SHARE:.0%} exact repeats, {NEAR_SHARE:.0%} near repeats, the rest new; an output ends at the "
    "end of its function, before a repeated line, or within an overlong line."
)
TASKS = "Requests: edits of code, quotes from a text, answers in JSON and turns of an agent, none of which repeats."
NOTES = (
    "Each request runs alone, once without drafts and once with them; the corpus of the sidecar starts empty.",
    "tokens per step: all draft tokens that the sidecar sends are verified.",
    "speed-up here: time of the requests without drafts / time with them.",
)


class Round(NamedTuple):
    """One request, run without and with drafts."""

    item: WorkItem
    plain: Turn
    drafted: Turn

    @property
    def tokens(self) -> np.ndarray:
        """The output with drafts, uint32 [n]."""
        return self.drafted.completions[0].tokens

    @property
    def is_same(self) -> bool:
        """Whether both outputs are the same, token by token."""
        return bool(np.array_equal(self.plain.completions[0].tokens, self.tokens))


def demonstrate(options: DemoFlags) -> bool:
    """Run the workload without and with drafts, write the report, and return whether all outputs were identical.

    Raises UserError.
    """
    prepare(options.out, files_of(NAME))
    console = Console()
    folder = find_model(options.model)
    tokenizer = Tokenizer(folder)
    items = _read_workload(folder, tokenizer, options)
    console.print(f"{len(items)} requests to {folder.name}, without drafts and with those of a sidecar", markup=False)
    model = pack(load_model(folder))
    with console.status("finding where each output ends (not timed)"):
        requests = requests_of(items, model, tokenizer, SamplingParams(options.max_tokens, options.temperature))
    condition = Condition("exact", options.temperature, 1)
    lost: list[str] = []
    rounds: list[Round] = []
    with running_sidecar(*SIDECAR_OPTIONS) as sidecar:
        engines = EngineOptions(folder=folder, device="cpu", address=sidecar.address, max_sequences=1)
        trial = Trial(model, tokenizer, engines, Workload((), (), options.max_tokens), lost.append, lambda *_: None)
        with trial.running([BASELINE, DRAFTER], condition, verifies_all=True) as cases:
            # Warms up both engines, and stays out of the corpus and of the prefix cache.
            for run in cases:
                run([replace(requests[0], learn=False, salt="warm-up")])
            turns = alternated(dict(enumerate(cases)), ([request] for request in requests))
            with LongProgress(console, len(items)) as progress:
                for item, turn in zip(items, turns, strict=True):
                    rounds.append(Round(item, turn[0], turn[1]))
                    if lost:
                        raise UserError(f"{lost[0]}; the figures would be wrong, so run again")
                    recent = result_of("", rounds[-max(10, len(items) // 10) :], condition)
                    progress.advance(1, f"{recent.tokens_per_s:,.0f} tokens/s, {recent.speedup:.2f}x")
    settings = {"model": folder.name, "requests": len(items), "drafter": DRAFTER.name}
    settings |= {name: getattr(options, name) for name in ("max_tokens", "temperature", "seed")}
    comparison = comparison_of(rounds, condition, settings)
    report(comparison, options.out, NAME, console)
    for task, tokens in {each.item.task: each.drafted.completions[0].content for each in rounds}.items():
        if task:
            console.print(f"[bold]the last output of {task}:[/]\n{escape(tokenizer.decode(tokens))}", soft_wrap=True)
    return comparison.is_exact


def requests_of(
    items: Sequence[WorkItem], model: Decoder, tokenizer: Tokenizer, sampling: SamplingParams
) -> list[Request]:
    """Return the requests of `items`, each with `max_tokens` set to where its output ends.

    A chat model ends the outputs of tasks itself.
    """
    # The chat template has rendered the special tokens of tasks. Exact repeats have the same output.
    unique = {
        (item.prompt, item.seed): Request(
            tokenizer.encode(item.prompt, add_special_tokens=not item.task), replace(sampling, seed=item.seed)
        )
        for item in items
    }
    if not items[0].task:
        # The drafter only speeds this up; the timed engines have their own caches and drafters.
        with closing(build_engine(model, LENGTHS_CONFIG, SuffixDrafter(DrafterConfig()))) as engine:
            lengths = find_lengths(engine, tokenizer, list(unique.values()), [prompt for prompt, _ in unique])
        for (key, request), length in zip(unique.items(), lengths, strict=True):
            unique[key] = replace(request, sampling=replace(request.sampling, max_tokens=length))
    return [unique[item.prompt, item.seed] for item in items]


def _read_workload(folder: Path, tokenizer: Tokenizer, options: DemoFlags) -> list[WorkItem]:
    """Return functions to complete, or tasks for a chat model whose folder has no prompts.

    Raises UserError if the model can do neither, and for too few prompts.
    """
    if (folder / PROMPTS_FILE).exists():
        return make_workload(read_texts(folder / PROMPTS_FILE), options.requests, options.seed)
    if load_chat_template(folder) is None:
        raise UserError(f"{folder} has neither a {PROMPTS_FILE}, with functions to complete, nor a chat template")
    return make_tasks(ChatPrompts(folder, tokenizer), options.seed)[: options.requests]


# --- Results


def comparison_of(rounds: Sequence[Round], condition: Condition, settings: dict[str, object]) -> Comparison:
    """Return the results by kind of request and as the corpus grows, from at least ten rounds."""
    kinds: dict[str, list[Round]] = {"all": [*rounds]}
    for each in sorted(rounds, key=lambda each: (KINDS.index(each.item.kind), each.item.task)):
        kinds.setdefault(each.item.task or each.item.kind, []).append(each)
    cuts = pairwise(round(part * len(rounds) / PARTS) for part in range(PARTS + 1))
    tenths = {f"requests {begin + 1} to {end}": rounds[begin:end] for begin, end in cuts}
    results = [
        result_of(name, members, replace(condition, part=part))
        for part, known in (("by kind of request", kinds), ("as the corpus grows", tenths))
        for name, members in known.items()
    ]
    whole, new = (result_of("", kinds.get(kind, kinds["all"]), condition) for kind in ("all", "new"))
    conclusion = (
        f"{whole.speedup:.2f}x the tokens/s of none over {whole.prompts} requests, {new.speedup:.2f}x over the "
        f"{new.prompts} new ones among them; {whole.figures.tokens_per_step:.2f} and "
        f"{new.figures.tokens_per_step:.2f} tokens per step."
    )
    loops = sum(int(find_loops(each.tokens).sum()) for each in rounds) / sum(len(each.tokens) for each in rounds)
    workload = TASKS if rounds[0].item.task else FUNCTIONS
    notes = [workload, *NOTES, f"{loops:.0%} of the output tokens are part of loops, which any drafter predicts."]
    if differing := [str(number) for number, each in enumerate(rounds, 1) if not each.is_same]:
        notes.append(f"Outputs differ in requests {', '.join(differing)}.")
    return Comparison(settings, None, None, made_with(), results, conclusion=conclusion, notes=notes)


def result_of(name: str, rounds: Sequence[Round], condition: Condition) -> Result:
    """Return the result of some requests, at least one: totals, with the speed-up of their whole time."""
    completions = [completion for each in rounds for completion in each.drafted.completions]
    tokens, steps = sum(len(each.tokens) for each in completions), sum(each.steps for each in completions)
    plain_s, drafted_s = sum(each.plain.wall_s for each in rounds), sum(each.drafted.wall_s for each in rounds)
    return Result(
        replace(DRAFTER, name=name),
        condition,
        Figures(tokens / steps, drafted_per_step=sum(each.drafted for each in completions) / steps),
        all(each.is_same for each in rounds),
        tokens_per_s=tokens / drafted_s,
        speedup=plain_s / drafted_s,
        prompts=len(rounds),
    )
