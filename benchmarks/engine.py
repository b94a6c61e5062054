"""Speed of the engine with each drafter at each concurrency, compared with transformers' `generate`.

    python -m benchmarks.engine --model PATH | --shape llama3-8b|llama3-1b|qwen3-0.6b|tiny [--replay TRACE.npz]
        [--drafter none,ngram,ssd] [--concurrency 1,4,16,64] [--device cuda] [--dtype bfloat16]
        [--attention flashinfer]

Requests are those of the demo's workload, or with --replay recorded traffic: the model's outputs are then replaced by
the recorded ones, so that a shape with random weights has the acceptance of real text. A trace is an .npz file, see
benchmarks/traces.py. Every run begins with an empty cache and an empty corpus. Contestants take turns, forwards and
backwards; figures are medians over the rounds:

    tokens_per_s          output tokens divided by the time of the whole run, prompts included
    speedup_vs_none       ratio of it to `none` at the same concurrency in the same round
    itl_ms                time between two tokens of a request; tokens of one step share its time
    ttft_ms               time from adding a request to its first token
    tokens_per_step       per sequence; drafted_per_step likewise
    overhead_ms_per_step  time outside model and drafter, median of the steps in which the whole batch produced
    share                 share of each stage in the time of all steps; commit includes drafters' work at the end
    peak_mib              peak memory of the process, models of all contestants included; on a GPU: GPU memory
    identical_to_none     whether all outputs equal those of `none`; null without `none`, and with --replay

The last line is one JSON document. Times depend on the machine: compare only within one run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks.engine_rows import Contestant, Row, rows_of
from benchmarks.memory import device_name, free_bytes
from benchmarks.replay import PLAIN_WIDTH, list_of, positive
from benchmarks.requests import Item, Limits, demo_items, is_renumbered, replay_items
from benchmarks.serving import Run, serve
from benchmarks.shapes import SHAPES, random_model
from benchmarks.traces import load_trace
from benchmarks.transformers_peer import PEERS, TransformersPeer, is_installed, same_model
from engine.attention.backend import choose_backend
from engine.commands.demo.sidecar import running_sidecar
from engine.commands.launch import find_device, find_dtype
from engine.commands.options import ATTENTIONS, DTYPES
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import KINDS, build_drafter, single_kind
from engine.engine import build_engine
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.hub import find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from ssd.config import DrafterConfig
from ssd.errors import UserError

COLUMNS = ("drafter", "concurrency", "tokens_per_s", "speedup_vs_none", "itl_ms_p50", "itl_ms_p99", "ttft_ms_p50")
MORE_COLUMNS = ("tokens_per_step", "drafted_per_step", "overhead_ms_per_step", "peak_mib", "identical_to_none")
WARM_UP_TOKENS = 8


class Contest:
    """One model, its requests, and the contestants."""

    def __init__(
        self,
        model: Decoder,
        items: Sequence[Item],
        peers: dict[str, TransformersPeer],
        *,
        folder: Path | None = None,
        attention: str = "auto",
        in_flight: int | None = None,
    ) -> None:
        """`folder`: of the model. `attention`: as in `build_engine`. `in_flight`: as in `EngineConfig`."""
        self._model = model
        self._items = items
        self._peers = peers
        self._folder = folder
        self._attention = attention
        self._in_flight = in_flight

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self._items)

    def warm_up(self, contestant: Contestant) -> None:
        """Run a few tokens, so that nothing is compiled or first allocated while it is timed."""
        short = [
            replace(item, request=replace(item.request, sampling=replace(item.request.sampling, max_tokens=most)))
            for item in self._items[: contestant[1]]
            if (most := min(WARM_UP_TOKENS, item.request.sampling.max_tokens))
        ]
        self.run(contestant, short)

    def run(self, contestant: Contestant, items: Sequence[Item] | None = None, progress: Progress | None = None) -> Run:
        """Run all items, or those given."""
        drafter, concurrency = contestant
        items = self._items if items is None else items

        def advance() -> None:
            if progress is not None:
                progress.advance(progress.task_ids[0])

        if drafter in self._peers:
            return self._peers[drafter].run(items, advance)
        weight = self._model.embedding.weight
        config = engine_config(self._model.config, items, concurrency, weight.dtype, free_bytes(str(weight.device)))
        config = replace(config, in_flight=self._in_flight)
        with ExitStack() as stack:
            address = stack.enter_context(running_sidecar()) if drafter == "ssd-remote" else ""
            target = TargetInfo.from_model(self._model, config, self._folder)
            drafter_config = DrafterConfig(max_draft=config.max_draft)
            drafts = build_drafter(drafter, drafter_config, target, address=address, warn=_warn)
            engine = build_engine(
                self._model,
                config,
                drafts,
                has_budget=drafter != "none",
                attention=self._attention,
            )
            stack.enter_context(closing(engine))
            return serve(engine, items, concurrency, advance)


def engine_config(
    model: ModelConfig, items: Sequence[Item], concurrency: int, dtype: torch.dtype, free: int | None = None
) -> EngineConfig:
    """Return settings with room for twice `concurrency` of the longest requests, within `free` bytes."""
    usual = EngineConfig()
    longest = max(len(item.request.prompt) + item.request.sampling.max_tokens for item in items)
    bytes_per_token = 2 * model.num_layers * model.num_kv_heads * model.head_dim * dtype.itemsize
    wanted = 2 * concurrency * (longest + usual.max_draft + usual.page_size) * bytes_per_token
    if free is not None:
        wanted = min(wanted, free)
    return EngineConfig(
        max_sequences=concurrency,
        max_step_tokens=max(usual.max_step_tokens, concurrency * (1 + usual.max_draft)),
        kv_memory_mib=max(usual.kv_memory_mib, -(-wanted >> 20)),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run every contestant and print the table and the document."""
    parser = build_parser()
    options = parser.parse_args(arguments)
    console = Console(width=None if sys.stdout.isatty() else PLAIN_WIDTH, highlight=False)
    try:
        contest, contestants, notes = prepare(options)
        for note in notes:
            console.print(note, markup=False)
        rounds = run_rounds(contest, contestants, options.rounds)
    except UserError as error:
        parser.error(str(error))
    rows = rows_of(rounds, replayed=options.replay is not None)
    print_rows(console, rows)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    document = {"results": rows, "notes": notes, "settings": settings, "load": os.getloadavg()[0]}
    print(json.dumps(document))


def prepare(options: argparse.Namespace) -> tuple[Contest, list[Contestant], list[str]]:
    """Return the contest, the contestants, and notes to print, for the options of the command line."""
    if options.threads:
        torch.set_num_threads(options.threads)
    folder = None if options.shape else find_model(options.model)
    device = find_device(options.device)
    dtype = find_dtype(options.dtype, device)
    model = (
        load_model(folder, dtype=dtype, device=device) if folder else random_model(SHAPES[options.shape], dtype, device)
    )
    attention = choose_backend(options.attention, model.config, dtype, device)
    notes = [
        f"{str(dtype).removeprefix('torch.')} on {device_name(device)}, {attention} attention, "
        f"{torch.get_num_threads()} threads, load {os.getloadavg()[0]:.1f} before"
    ]
    if folder is None:
        notes.append(f"random weights of the shape {options.shape}: outputs are meaningless")
    items = read_items(options, folder, model.config, notes)
    longest = max(len(item.request.prompt) + item.request.sampling.max_tokens for item in items)
    if longest > model.config.max_positions:
        raise UserError(
            f"prompts of up to {options.prompt_tokens} and outputs of up to {options.max_tokens} tokens do not fit "
            f"into the model's context of {model.config.max_positions}; lower --prompt-tokens or --max-tokens"
        )
    names: tuple[str, ...] = PEERS if options.peers else ()
    if names and not is_installed():
        names = ()
        notes.append("skipped transformers: it is not installed (pip install transformers), or give --no-peers")
    other = same_model(folder, model, dtype) if names else None
    peers = {
        name: TransformersPeer(other, lookup=name != "transformers", eos_token_ids=model.config.eos_token_ids)
        for name in names
    }
    for name, peer in peers.items():
        peer.find_best_cache(items[0])
        notes.append(f"{name}: one request at a time, cache {peer.cache or 'dynamic'}")
    contestants = [(drafter, concurrency) for concurrency in options.concurrency for drafter in options.drafter]
    contest = Contest(pack(model), items, peers, folder=folder, attention=attention, in_flight=options.in_flight)
    return contest, [(name, 1) for name in names] + contestants, notes


def read_items(options: argparse.Namespace, folder: Path | None, model: ModelConfig, notes: list[str]) -> list[Item]:
    """Return the requests and describe them in `notes`. Raises UserError if there are none."""
    limits = Limits(options.prompt_tokens, options.max_tokens, options.temperature, options.ignore_eos)
    if options.replay is None:
        return demo_items(folder, options.requests, limits, repeats=options.repeats)
    try:
        trace = load_trace(options.replay)
    except ValueError as error:
        raise UserError(f"{error}; without --replay, the prompts of the shipped model are run") from None
    numbers = "were renumbered" if is_renumbered(trace, options.requests, limits, model) else "are the trace's"
    notes.append(f"replay of {trace.name}: outputs are the recorded ones, not the model's; token ids {numbers}")
    return replay_items(trace, options.requests, limits, model)


def run_rounds(contest: Contest, contestants: Sequence[Contestant], rounds: int) -> dict[Contestant, list[Run]]:
    """Run every contestant once per round, in turns forwards and backwards, with progress on stderr."""
    runs: dict[Contestant, list[Run]] = {contestant: [] for contestant in contestants}
    with Progress(console=Console(stderr=True)) as progress:
        progress.add_task("warming up", total=rounds * len(contestants) * contest.size)
        for contestant in contestants:
            contest.warm_up(contestant)
        for number in range(rounds):
            for contestant in contestants if number % 2 == 0 else reversed(contestants):
                drafter, concurrency = contestant
                progress.update(progress.task_ids[0], description=f"round {number + 1}: {drafter} x{concurrency}")
                runs[contestant].append(contest.run(contestant, progress=progress))
    return runs


def print_rows(console: Console, rows: Sequence[Row]) -> None:
    """Print the figures as a table."""
    table = Table()
    for name in (*COLUMNS, *MORE_COLUMNS):
        table.add_column(name.replace("_", " "), justify="left" if name == "drafter" else "right")
    for row in rows:
        table.add_row(*("-" if row[name] is None else str(row[name]) for name in (*COLUMNS, *MORE_COLUMNS)))
    console.print(table)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.engine", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--model", type=Path, metavar="PATH", help="a Hugging Face folder or name (the shipped model)")
    which.add_argument("--shape", choices=SHAPES, help="or random weights of this shape")
    add: Any = parser.add_argument
    add("--device", default="auto", help="cpu, cuda, ... (a GPU where there is one)")
    add("--dtype", choices=DTYPES, default="auto", help="float32 on a CPU, bfloat16 on a GPU")
    add("--attention", choices=ATTENTIONS, default="auto", help="FlashInfer's on a GPU where it is installed")
    add("--replay", type=Path, metavar="TRACE", help="recorded traffic, .npz, instead of the model's outputs")
    add("--drafter", type=list_of(drafter_name), default=["none", "ssd"], help=f"none,ssd; of {','.join(KINDS)}")
    add("--concurrency", type=list_of(positive), default=[1, 4, 16, 64], help="requests that run at once (1,4,16,64)")
    add("--requests", type=positive, default=64, metavar="N", help="64")
    add("--repeats", action=argparse.BooleanOptionalAction, default=True, help="the demo's repeats, or all prompts new")
    add("--prompt-tokens", type=positive, default=512, metavar="N", help="longer prompts lose their beginning (512)")
    add("--max-tokens", type=positive, default=128, metavar="N", help="per output (128)")
    add("--ignore-eos", action="store_true", help="every output has --max-tokens")
    add("--temperature", type=float, default=0.0, help="0, greedy")
    add("--rounds", type=positive, default=3, metavar="N", help="3")
    add("--threads", type=positive, metavar="N", help="of PyTorch, for all contestants")
    add(
        "--in-flight",
        type=int,
        choices=(0, 1),
        help="steps in flight while the next one is planned (decided at run time)",
    )
    add("--peers", action=argparse.BooleanOptionalAction, default=True, help="run transformers as well")
    return parser


def drafter_name(text: str) -> str:
    """Check the name of a drafter."""
    try:
        return single_kind(text)
    except UserError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from None


def _warn(text: str) -> None:
    print(text, file=sys.stderr)


if __name__ == "__main__":
    main()
