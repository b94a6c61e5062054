"""What generates rollouts: an engine in this process, or several in processes of their own with the same interface."""

from __future__ import annotations

import multiprocessing
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from time import process_time
from typing import Any, NamedTuple

import torch

from benchmarks.rollouts.problems import Problem, Settings, read_problems
from drafter_service.observability.measuring.sidecar import running_sidecar
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model, write_tensors
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Completion, Request, SamplingParams, sample_seed
from ssd.config import DrafterConfig
from ssd.corpus import rollout as rollouts

REMOTE = "ssd-remote"
Weights = dict[str, torch.Tensor]
"""Tensors by their names in checkpoints."""


class Sample(NamedTuple):
    """One output that is wanted."""

    version: int
    """The training step that the weights are from."""
    problem: int
    number: int
    """Number of the sample in its group."""


Rollout = tuple[list[Completion], float]
"""Outputs in the order of the samples, and processor time of all engines in seconds, without the weight update."""


class RolloutEngine:
    """One engine in this process, with the shipped model."""

    def __init__(self, settings: Settings, drafter: str, address: str = "") -> None:
        """drafter: as for `ssd-engine --drafter`. address: the sidecar's, for `ssd-remote`."""
        torch.set_num_threads(settings.threads // settings.engines)
        self._settings = settings
        self._problems = read_problems(settings.problems)
        tokenizer = Tokenizer(SHIPPED_MODEL)
        self._prompts = [tokenizer.encode(each.prompt)[-settings.prompt_tokens :] for each in self._problems]
        model = pack(load_model(SHIPPED_MODEL))
        is_drafted = drafter != "none"
        config = EngineConfig(
            max_sequences=settings.max_sequences // settings.engines, max_draft=EngineConfig.max_draft * is_drafted
        )
        target = TargetInfo.from_model(model, config, SHIPPED_MODEL)
        drafts = build_drafter(drafter, DrafterConfig(max_draft=EngineConfig.max_draft), target, address=address)
        self._engine = build_engine(model, config, drafts, tokenizer.decode, has_budget=is_drafted)

    def update(self, weights: Weights | Path, version: int) -> None:
        """Replace the weights by tensors or those of a file."""
        self._engine.update_weights(weights, version=version)

    def roll(self, samples: Sequence[Sample]) -> Rollout:
        """Generate outputs."""
        requests = [self.request(sample) for sample in samples]
        began = process_time()
        completions = self._engine.generate(requests)
        return completions, process_time() - began

    def request(self, sample: Sample) -> Request:
        """Return the request for a sample, whose seed depends on version, problem and number."""
        problem: Problem = self._problems[sample.problem]
        seed = sample_seed(self._settings.seed + sample.version, 1 + sample.problem)
        sampling = SamplingParams(
            max_tokens=self._settings.max_tokens,
            temperature=1.0,
            seed=sample_seed(seed, sample.number),
            stop=problem.stop,
        )
        rollout = rollouts.Rollout(problem.group, sample.version)
        return Request(self._prompts[sample.problem], sampling, rollout=rollout)

    def close(self) -> None:
        """Release the drafter."""
        self._engine.close()


class EngineProcesses:
    """Several engines in processes of their own. Each generates its share of every group."""

    def __init__(self, settings: Settings, drafter: str, address: str, stack: ExitStack) -> None:
        """stack: ends the processes."""
        context = multiprocessing.get_context("spawn")
        pools = [
            ProcessPoolExecutor(1, context, initializer=_open, initargs=(settings, drafter, address))
            for _ in range(settings.engines)
        ]
        self._pools = [stack.enter_context(pool) for pool in pools]
        self._folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ssd-")))
        stack.callback(self._call_all, [("close",)] * settings.engines)

    def update(self, weights: Weights, version: int) -> None:
        """Replace the weights of all engines, through a file."""
        path = self._folder / "weights.safetensors"
        write_tensors({name: tensor.clone() for name, tensor in weights.items()}, path)
        self._call_all([("update", path, version)] * len(self._pools))

    def roll(self, samples: Sequence[Sample]) -> Rollout:
        """Generate outputs; sample n of a group is made by engine n modulo the number of engines."""
        count = len(self._pools)
        owners = [sample.number % count for sample in samples]
        parts = [[sample for sample, owner in zip(samples, owners, strict=True) if owner == n] for n in range(count)]
        completions, seconds = zip(*self._call_all([("roll", part) for part in parts]), strict=True)
        outputs = [iter(own) for own in completions]
        return [next(outputs[owner]) for owner in owners], sum(seconds)

    def _call_all(self, calls: Sequence[tuple]) -> list:
        futures = [pool.submit(_call, *call) for pool, call in zip(self._pools, calls, strict=True)]
        return [future.result() for future in futures]


_engine: RolloutEngine
"""The engine of this process, if it is one of `EngineProcesses`."""


def _open(*arguments: Any) -> None:
    global _engine
    _engine = RolloutEngine(*arguments)


def _call(name: str, *arguments: Any) -> Any:
    return getattr(_engine, name)(*arguments)


Engines = RolloutEngine | EngineProcesses


@contextmanager
def running_engines(settings: Settings, drafter: str) -> Iterator[Engines]:
    """Yield engines with a drafter, and a sidecar that they share if the drafter is `ssd-remote`."""
    with ExitStack() as stack:
        address = stack.enter_context(running_sidecar()).address if drafter == REMOTE else ""
        if settings.engines > 1:
            yield EngineProcesses(settings, drafter, address, stack)
        else:
            engine = RolloutEngine(settings, drafter, address)
            stack.callback(engine.close)
            yield engine
