"""Driving a drafter with a recorded output in the target's place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from ssd.draft import Drafter, Progress, offsets_of


def progress_of(committed: Mapping[int, Sequence[int]], limit: int, verified: int = 0, accepted: int = 0) -> Progress:
    """A step's progress: tokens committed by sequence id, the same counts and limit for each."""
    runs = [np.asarray(tokens, np.uint32) for tokens in committed.values()]
    return Progress(
        sequence_ids=np.array(list(committed), np.uint64),
        tokens=np.concatenate([*runs, np.empty(0, np.uint32)]).astype(np.uint32),
        offsets=offsets_of(np.array([len(run) for run in runs], np.uint32)),
        verified=np.full(len(runs), verified, np.uint32),
        accepted=np.full(len(runs), accepted, np.uint32),
        max_draft=np.full(len(runs), limit, np.uint32),
    )


def replay_one(
    drafter: Drafter,
    sequence_id: int,
    prompt: np.ndarray,
    output: np.ndarray,
    limit: int = 16,
    *,
    learn: bool = True,
) -> int:
    """Run one request whose greedy output is known; returns the steps that it took."""
    drafter.start(sequence_id, prompt)
    done, steps, verified, accepted = 0, 0, 0, 0
    last = np.empty(0, np.uint32)
    while done < len(output):
        drafts = drafter.draft(progress_of({sequence_id: last}, limit, verified, accepted))
        draft = drafts.tokens_of(0)[: len(output) - done - 1]
        verified, accepted = len(draft), 0
        while accepted < verified and draft[accepted] == output[done + accepted]:
            accepted += 1
        last = output[done : done + accepted + 1]
        done += len(last)
        steps += 1
    drafter.finish(sequence_id, last, verified=verified, accepted=accepted, learn=learn)
    return steps
