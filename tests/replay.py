"""Drive a drafter with a recorded output instead of a target."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from ssd import Corpus, DraftBatch, DrafterConfig, SuffixDrafter
from ssd.replay import Recording
from ssd.types import ROOT, Drafter, Progress, offsets_of


def drafter_of(requests: Iterable[Sequence[int]] = (), **settings: object) -> SuffixDrafter:
    """Return a drafter over a corpus with some requests; `corpus.refresh` adds later ones."""
    config = DrafterConfig(**{"capacity": 100_000, **settings})
    corpus = Corpus.from_config(config)
    for request in requests:
        corpus.append(np.asarray(request, np.uint32))
    corpus.refresh()
    return SuffixDrafter(config, corpus=corpus)


def progress_of(
    committed: Mapping[int, Sequence[int]],
    limit: int,
    verified: int = 0,
    cost: float | None = None,
) -> Progress:
    """Return the progress of a step: committed tokens by sequence id, with equal counts and limits."""
    runs = [np.asarray(tokens, np.uint32) for tokens in committed.values()]
    return Progress(
        sequence_ids=np.array(list(committed), np.uint64),
        tokens=np.concatenate([*runs, np.empty(0, np.uint32)]).astype(np.uint32),
        offsets=offsets_of(np.array([len(run) for run in runs], np.uint32)),
        verified=np.full(len(runs), verified, np.uint32),
        max_draft=np.full(len(runs), limit, np.uint32),
        cost=cost,
    )


def branches(tokens: Sequence[int], parents: Sequence[int]) -> list[list[int]]:
    """Return the path from the context to each token of a draft."""
    paths: list[list[int]] = []
    for token, parent in zip(tokens, parents, strict=True):
        paths.append([*(paths[parent] if parent >= 0 else []), token])
    return paths


def accepted_path(drafts: DraftBatch, index: int, output: Sequence[int]) -> list[int]:
    """Return the indices of a sequence's draft tokens that are a path through the target's output."""
    own = slice(drafts.offsets[index], drafts.offsets[index + 1])
    children = {
        (parent, token): node
        for node, (parent, token) in enumerate(
            zip(drafts.parents[own].tolist(), drafts.tokens[own].tolist(), strict=True)
        )
    }
    path: list[int] = []
    for token in output:
        node = children.get((path[-1] if path else ROOT, int(token)))
        if node is None:
            break
        path.append(node)
    return path


def replayed(
    drafter: Drafter,
    sequence_id: int,
    prompt: np.ndarray,
    output: np.ndarray,
    limit: int = 16,
    *,
    learn: bool = True,
    refreshes: bool = False,
    within: bool = False,
    **options: object,
) -> Iterator[tuple[DraftBatch, np.ndarray, int]]:
    """Run one request whose greedy output is known: the slow twin of `ssd.replay.replay`.

    Yields the draft of each step, the output from there on and the number of accepted tokens. refreshes: whether all
    text is indexed before each draft. within: whether drafts end before the output's last token. options: those of
    `start`.
    """
    drafter.start(sequence_id, prompt, **options)
    done, verified, last = 0, 0, np.empty(0, np.uint32)
    while done < len(output):
        if refreshes:
            drafter.corpus.refresh()
        most = min(limit, len(output) - done - 1) if within else limit
        drafts = drafter.draft(progress_of({sequence_id: last}, most, verified))
        verified, accepted = len(drafts.tokens), len(accepted_path(drafts, 0, output[done:]))
        yield drafts, output[done:], accepted
        last = output[done : done + accepted + 1]
        done += len(last)
    drafter.finish(sequence_id, last, verified=verified, learn=learn)


def replay_one(drafter: Drafter, *request: object, **options: object) -> int:
    """Run one request whose greedy output is known; return the number of steps. Arguments as of `replayed`."""
    return sum(1 for _ in replayed(drafter, *request, within=True, **options))


def recording_of(requests: Sequence[tuple[Sequence[int], Sequence[int]]], **columns: Sequence[float]) -> Recording:
    """Return the recording of pairs of prompt and output; columns: as of `Recording.from_arrays`."""
    texts = [np.array([*prompt, *output], np.uint32) for prompt, output in requests]
    return Recording.from_arrays(
        np.concatenate([*texts, np.empty(0, np.uint32)]),
        np.array([len(prompt) for prompt, _ in requests], np.int64),
        np.array([len(output) for _, output in requests], np.int64),
        **{name: np.array(column) for name, column in columns.items()},
    )
