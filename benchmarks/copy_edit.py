"""Replay requests for edited copies of texts: with the text as predicted output, in the prompt, both, or neither.

`python -m benchmarks.copy_edit` takes parts of Python's standard library, renames a word in each, removes and inserts
lines, and replays the results as outputs, as tokens of the shipped model. Nothing is learned, so drafts come from the
request alone. The last line of the output is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from dataclasses import dataclass

import numpy as np

import ssd
from benchmarks.contestants import Embedded, Running
from benchmarks.rounds import replay
from benchmarks.scores import figures
from benchmarks.traces import Request, Trace
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.training.sources import read_files, stdlib_root
from ssd.config import DrafterConfig

INSTRUCTION = "# Rename {old} to {new}, and repeat the whole file:\n"
LINES = 80
"""Lines of a text."""
MIN_WORD = 4
REMOVED, INSERTED = 0.02, 0.02
"""Shares of lines that are removed, and after which a line of another text is inserted."""
CASES = {"neither": (False, False), "prediction": (False, True), "in the prompt": (True, False), "both": (True, True)}
"""Whether the text is in the prompt, and whether it is the predicted output."""
COST = 0.02


@dataclass(frozen=True)
class Edit:
    """An instruction, a text and its edited copy, uint32 [N] each."""

    instruction: np.ndarray
    text: np.ndarray
    edited: np.ndarray


class Predicted(Embedded):
    """A drafter that gets the texts as predicted outputs, or does not; it learns nothing."""

    def __init__(self, shape: str, max_draft: int, hints: list[np.ndarray] | None) -> None:
        """hints: text of each request, uint32."""
        config = DrafterConfig(capacity=1 << 16, draft_shape=shape, max_draft=max_draft, cost=COST)  # type: ignore[arg-type]
        self._own = ssd.SuffixDrafter(config)
        self._hints = hints
        super().__init__(self._own, max_draft)

    def start(self, sequence: Running) -> None:
        """Begin a request."""
        hints = None if self._hints is None else self._hints[sequence.index]
        self._own.start(sequence.index, sequence.request.prompt, hints=hints, learn=False)

    def finish(self, sequence: Running) -> None:
        """End a request."""
        self._own.finish(sequence.index, sequence.last, verified=sequence.verified, learn=False)


def make_edits(count: int, seed: int) -> list[Edit]:
    """Return edits of parts of different files."""
    rng, tokenizer = random.Random(seed), Tokenizer(SHIPPED_MODEL)
    files = [lines for file in read_files(stdlib_root()) if len(lines := file.text.splitlines(keepends=True)) > LINES]
    edits = []
    for lines in rng.sample(files, count):
        first = rng.randrange(len(lines) - LINES)
        kept = lines[first : first + LINES]
        text = "".join(kept)
        words = sorted({word for word in re.findall(r"[a-z_]+", text) if len(word) >= MIN_WORD}) or ["self"]
        old, new = rng.choice(words), f"{rng.choice(words)}_{rng.choice(words)}"
        changed = []
        for line in kept:
            if rng.random() >= REMOVED:
                changed.append(re.sub(rf"\b{old}\b", new, line))
            if rng.random() < INSERTED:
                changed.append(rng.choice(rng.choice(files)))
        texts = (INSTRUCTION.format(old=old, new=new), text, "".join(changed))
        edits.append(Edit(*(tokenizer.encode(each, add_special_tokens=False) for each in texts)))
    return edits


def measure(edits: list[Edit], case: str, shape: str, max_draft: int) -> dict[str, float]:
    """Return the figures of a replay of edits in one of the `CASES`."""
    in_prompt, is_predicted = CASES[case]
    requests = []
    for session, edit in enumerate(edits):
        prompt = np.concatenate([edit.instruction, edit.text] if in_prompt else [edit.instruction])
        requests.append(Request(np.concatenate([prompt, edit.edited]), len(prompt), session))
    hints = [edit.text for edit in edits] if is_predicted else None
    return figures(replay(Predicted(shape, max_draft, hints), Trace(case, requests)), COST)


def main() -> None:
    """Replay all cases and print their tokens per step."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-draft", type=int, default=32, help="maximum number of tokens in a draft")
    options = parser.parse_args()
    edits = make_edits(options.requests, options.seed)
    rows = [
        {"case": case, "shape": shape} | measure(edits, case, shape, options.max_draft)
        for shape in ("path", "tree")
        for case in CASES
    ]
    for row in rows:
        print(
            f"{row['shape']}, {row['case']:14} {row['tokens_per_step']:6.2f} tokens per step, "
            f"{row['drafted_per_step']:5.1f} drafted, {row['output_tokens']} output tokens"
        )
    print(json.dumps(rows))


if __name__ == "__main__":
    main()
