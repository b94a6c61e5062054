"""Rollouts of reinforcement learning in the reference engine: the same problems in each epoch, several samples of each.

    python examples/rollouts.py

Prints tokens per step of two epochs, at temperature 0.6. In the second one, drafts also come from the samples of the
first one. A training step would come between the epochs, with `engine.update_weights(...)`.
"""

import json

from engine.config import EngineConfig
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.packed import pack
from engine.models.shipped import SHIPPED_MODEL
from engine.models.tokenizer import Tokenizer
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.corpus.rollout import Rollout

PROBLEMS, SAMPLES, EPOCHS = 8, 4, 2


def main():
    tokenizer, model = Tokenizer(SHIPPED_MODEL), pack(load_model(SHIPPED_MODEL))
    lines = (SHIPPED_MODEL / "prompts.jsonl").read_text().splitlines()[:PROBLEMS]
    prompts = [tokenizer.encode(json.loads(line)["prompt"]) for line in lines]
    engine = build_engine(model, EngineConfig(), build_drafter("ssd", DrafterConfig()))
    for epoch in range(EPOCHS):
        # The group names a problem in all epochs; the version is the training step of the weights. The engine tells the
        # drafter the seed, from which it knows the noise of the sampler.
        requests = [
            Request(
                prompt,
                SamplingParams(max_tokens=64, temperature=0.6, seed=(epoch * SAMPLES + sample) * PROBLEMS + problem),
                rollout=Rollout(f"problem {problem}", version=epoch),
            )
            for problem, prompt in enumerate(prompts)
            for sample in range(SAMPLES)
        ]
        completions = engine.generate(requests)
        tokens = sum(len(completion.tokens) for completion in completions)
        print(f"epoch {epoch + 1}: {tokens / sum(completion.steps for completion in completions):.2f} tokens per step")
    engine.close()


if __name__ == "__main__":
    main()
