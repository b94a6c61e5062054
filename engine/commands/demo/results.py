"""Results of a workload that was run without and with drafts, as rows of a comparison."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np

from engine.commands.compare.figures import find_loops
from engine.commands.compare.results import Condition, Result
from engine.commands.compare.trial import Turn
from engine.commands.demo.workload import KINDS, WorkItem
from ssd.config import DraftShape

PARTS = 10


@dataclass(frozen=True)
class Round:
    """One request, run without and with drafts."""

    item: WorkItem
    plain: Turn
    drafted: Turn

    @property
    def is_same(self) -> bool:
        """Whether both outputs are the same, token by token."""
        [expected], [completion] = self.plain.completions, self.drafted.completions
        return bool(np.array_equal(expected.tokens, completion.tokens))


def result_of(name: str, rounds: Sequence[Round], condition: Condition, shape: DraftShape, max_draft: int) -> Result:
    """Return the result of some requests, at least one: totals, with the speed-up of their whole time."""
    completions = [completion for each in rounds for completion in each.drafted.completions]
    plain_s, drafted_s = (sum(getattr(each, run).wall_s for each in rounds) for run in ("plain", "drafted"))
    tokens, steps = (sum(len(each.tokens) for each in completions), sum(each.steps for each in completions))
    return Result(
        drafter=name,
        K=max_draft,
        has_depth=False,
        draft_shape=shape,
        tokens_per_step=tokens / steps,
        tokens_per_step_no_loops=None,
        drafted_per_step=sum(each.drafted for each in completions) / steps,
        accept_by_position=[],
        drafted_by_position=[],
        step_ms=None,
        drafting_ms=None,
        identical=all(each.is_same for each in rounds),
        tokens_per_s=tokens / drafted_s,
        speedup=plain_s / drafted_s,
        speedup_range=None,
        prompts=len(rounds),
        **asdict(condition),
    )


def parts_of(rounds: Sequence[Round]) -> Iterator[tuple[str, Mapping[str, Sequence[Round]]]]:
    """Yield what requests are divided by, and the requests of each part by name; at least ten requests."""
    order = sorted({(KINDS.index(each.item.kind), each.item.kind, each.item.task) for each in rounds})
    kinds = {
        task or kind: [each for each in rounds if (each.item.kind, each.item.task) == (kind, task)]
        for _, kind, task in order
    }
    yield "by kind of request", {"all": rounds, **kinds}
    cuts = [round(part * len(rounds) / PARTS) for part in range(PARTS + 1)]
    yield "as the corpus grows", {f"requests {begin + 1} to {end}": rounds[begin:end] for begin, end in pairwise(cuts)}


def results_of(rounds: Sequence[Round], condition: Condition, shape: DraftShape, max_draft: int) -> list[Result]:
    """Return the results of all parts of the workload."""
    return [
        result_of(name, members, replace(condition, part=part), shape, max_draft)
        for part, known in parts_of(rounds)
        for name, members in known.items()
    ]


def loop_share(rounds: Sequence[Round]) -> float:
    """Return the fraction of output tokens that are part of a loop, which any drafter would predict."""
    outputs = [completion.tokens for each in rounds for completion in each.drafted.completions]
    return sum(int(find_loops(tokens).sum()) for tokens in outputs) / sum(map(len, outputs))
