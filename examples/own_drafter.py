"""A drafter of one's own, in the reference engine: docs/api.md describes the interface.

    python examples/own_drafter.py
    cd examples && ssd-engine serve --drafter own_drafter:Pairs --drafter-option tokens=8

The first command generates the same text twice and prints tokens per step: 1.0, and more in the second run.
"""

from itertools import pairwise

import numpy as np

from engine.config import EngineConfig
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.types import DraftBatch, Drafter, Path


class Pairs(Drafter):
    """Drafts what last followed the same two tokens in a finished request. The option `tokens` limits a draft."""

    def __init__(self, config, target):  # The target is for drafters that use the model.
        self.limit = int(config.options.get("tokens", 16))
        self.next, self.texts = {}, {}

    def start(self, sequence_id, prompt):
        self.texts[sequence_id] = prompt.tolist()

    def draft(self, progress):
        paths = []
        for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
            text = self.texts[sequence_id]
            text += progress.tokens[progress.offsets[index] : progress.offsets[index + 1]].tolist()
            drafted = text[-2:]
            for _ in range(min(self.limit, int(progress.max_draft[index]))):
                if (token := self.next.get(tuple(drafted[-2:]))) is None:
                    break
                drafted.append(token)
            tokens = np.array(drafted[2:], np.uint32)
            # The estimated probability that each token is accepted, by which the engine selects what it verifies.
            paths.append(Path(tokens, np.full(len(tokens), 0.8, np.float32)))
        return DraftBatch.from_paths(paths)

    def finish(self, sequence_id, tokens, *, verified=0, learn=True):
        text = [*self.texts.pop(sequence_id), *tokens.tolist()]
        if learn:
            self.next.update(zip(pairwise(text), text[2:], strict=False))


def main():
    tokenizer, model = Tokenizer(SHIPPED_MODEL), pack(load_model(SHIPPED_MODEL))
    engine = build_engine(model, EngineConfig(), Pairs(DrafterConfig(), target=None))
    request = Request(tokenizer.encode("def quicksort(items):"), SamplingParams(max_tokens=64))
    for run in (1, 2):
        [completion] = engine.generate([request])
        print(f"run {run}: {len(completion.tokens) / completion.steps:.1f} tokens per step")
    engine.close()


if __name__ == "__main__":
    main()
