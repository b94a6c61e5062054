"""The comparison of `benchmarks.engine`: one model, its requests, and the cases that alternately run them."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console
from rich.progress import Progress

from benchmarks.support.engine_rows import FORCED, Case
from benchmarks.support.memory import device_name, free_bytes
from benchmarks.support.requests import FUNCTION_GRAMMAR, Item, Limits, demo_items, is_renumbered, replay_items
from benchmarks.support.serving import Run, serve
from benchmarks.support.shapes import SHAPES, random_model
from benchmarks.support.transformers_peer import PEERS, TransformersPeer, is_installed, same_model
from benchmarks.traces import load_trace
from engine.attention.backend import choose_backend
from engine.commands.demo.sidecar import running_sidecar
from engine.commands.launch import find_device, find_dtype
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.config import ModelConfig
from engine.models.decoder import Decoder
from engine.models.hub import find_model
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar_state import GrammarCompiler
from ssd.config import DrafterConfig
from ssd.errors import UserError

WARM_UP_TOKENS = 8


class Comparison:
    """One model, its requests, and the cases."""

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
        """folder: the model's folder. attention: as in `build_engine`. in_flight: as in `EngineConfig`."""
        self._model = model
        self._items = items
        self._peers = peers
        self._folder = folder
        self._attention = attention
        self._in_flight = in_flight
        tokenizer = Tokenizer(folder or SHIPPED_MODEL)
        self._grammars = GrammarCompiler(tokenizer, model.config.vocab_size, model.config.eos_token_ids)

    @property
    def items(self) -> Sequence[Item]:
        """The requests."""
        return self._items

    @property
    def size(self) -> int:
        """Number of requests."""
        return len(self._items)

    def warm_up(self, case: Case) -> None:
        """Run a few tokens, so that compilation and first allocations are not timed."""
        short = [
            replace(item, request=replace(item.request, sampling=replace(item.request.sampling, max_tokens=most)))
            for item in self._items[: case[1]]
            if (most := min(WARM_UP_TOKENS, item.request.sampling.max_tokens))
        ]
        self.run(case, short)

    def run(self, case: Case, items: Sequence[Item] | None = None, progress: Progress | None = None) -> Run:
        """Run `items`; None: all items of the comparison."""
        drafter, concurrency = case
        items = self._items if items is None else items

        def advance() -> None:
            if progress is not None:
                progress.advance(progress.task_ids[0])

        if drafter in self._peers:
            return self._peers[drafter].run(items, advance)
        weight = self._model.embedding.weight
        config = engine_config(self._model.config, items, concurrency, weight.dtype, free_bytes(str(weight.device)))
        drafter_config = DrafterConfig(max_draft=config.max_draft)
        # Without a limit of 0, what grammars force would be drafted.
        config = replace(config, in_flight=self._in_flight, max_draft=0 if drafter == "none" else config.max_draft)
        with ExitStack() as stack:
            address = stack.enter_context(running_sidecar()) if drafter == "ssd-remote" else ""
            target = TargetInfo.from_model(self._model, config, self._folder)
            kind = "none" if drafter == FORCED else drafter
            drafts = build_drafter(kind, drafter_config, target, address=address, warn=_warn)
            engine = build_engine(
                self._model,
                config,
                drafts,
                has_budget=drafter != "none",
                attention=self._attention,
                grammars=self._grammars,
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


def prepare(options: argparse.Namespace) -> tuple[Comparison, list[Case], list[str]]:
    """Return the comparison, the cases, and notes to print, for the options of the command line."""
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
    names: tuple[str, ...] = PEERS if options.peers and not options.structured else ()
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
    cases = [(drafter, concurrency) for concurrency in options.concurrency for drafter in options.drafter]
    comparison = Comparison(pack(model), items, peers, folder=folder, attention=attention, in_flight=options.in_flight)
    return comparison, [(name, 1) for name in names] + cases, notes


def read_items(options: argparse.Namespace, folder: Path | None, model: ModelConfig, notes: list[str]) -> list[Item]:
    """Return the requests and describe them in `notes`. Raises UserError if there are none."""
    grammar = FUNCTION_GRAMMAR if options.structured else None
    limits = Limits(options.prompt_tokens, options.max_tokens, options.temperature, options.ignore_eos, grammar)
    if options.replay is None:
        return demo_items(folder, options.requests, limits, repeats=options.repeats)
    try:
        trace = load_trace(options.replay)
    except ValueError as error:
        raise UserError(f"{error}; without --replay, the prompts of the shipped model are run") from None
    numbers = "were renumbered" if is_renumbered(trace, options.requests, limits, model) else "are the trace's"
    notes.append(f"replay of {trace.name}: outputs are the recorded ones, not the model's; token ids {numbers}")
    return replay_items(trace, options.requests, limits, model)


def run_rounds(comparison: Comparison, cases: Sequence[Case], rounds: int) -> dict[Case, list[Run]]:
    """Run every case once per round, in reversed order every second round, with progress on stderr."""
    runs: dict[Case, list[Run]] = {case: [] for case in cases}
    with Progress(console=Console(stderr=True)) as progress:
        progress.add_task("warming up", total=rounds * len(cases) * comparison.size)
        for case in cases:
            comparison.warm_up(case)
        for number in range(rounds):
            for case in cases if number % 2 == 0 else reversed(cases):
                drafter, concurrency = case
                progress.update(progress.task_ids[0], description=f"round {number + 1}: {drafter} x{concurrency}")
                run = comparison.run(case, progress=progress)
                runs[case].append(run)
                rate = sum(map(len, run.outputs)) / run.seconds
                progress.console.print(f"round {number + 1}: {drafter} x{concurrency}: {rate:,.0f} tokens/s")
    return runs


def _warn(text: str) -> None:
    print(text, file=sys.stderr)
