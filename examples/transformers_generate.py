"""Drafts in `generate` of Hugging Face transformers, here with the model that comes with this project.

    pip install . transformers
    python examples/transformers_generate.py                              # a corpus in this process
    python examples/transformers_generate.py unix:/tmp/ssd-drafter.sock   # that of a sidecar: ssd-drafter serve

Prints tokens per forward pass for a first and a second pass over the same prompts, and fails if an output differs from
the one without drafts.
"""

import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from drafter_service.plugins.transformers import SsdGenerate

MODEL = Path(__file__).parents[1] / "engine" / "models" / "assets" / "stdlib-7m"
PROMPTS = ("def quicksort(items):", "class Server:", "import unittest\n\n\nclass Test")


def main(sidecar="embedded"):
    # A pass over several tokens rounds differently than one over one token: in float32 that can decide a near tie.
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float64)
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    prompts = [tokenizer(prompt, return_tensors="pt") for prompt in PROMPTS]
    settings = {"max_new_tokens": 64, "do_sample": False}
    plain = [model.generate(**prompt, **settings).tolist() for prompt in prompts]
    ssd = SsdGenerate(model, sidecar=sidecar)
    for name in ("first", "second"):
        accepted, steps = ssd.counters.accepted, ssd.counters.steps
        assert [model.generate(**prompt, **settings, custom_generate=ssd).tolist() for prompt in prompts] == plain
        accepted, steps = ssd.counters.accepted - accepted, ssd.counters.steps - steps
        print(f"{name} pass: {1 + accepted / steps:.1f} tokens per forward pass")
    ssd.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
