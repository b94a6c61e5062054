"""Calls of `generate` with the shipped model."""

from pathlib import Path

import torch

import engine

FOLDER = Path(engine.__file__).parent / "models" / "assets" / "stdlib-7m"
PROMPTS = ["def quicksort(items):", "class Server:\n    def __init__(self", "import os\nimport sys\n\n"]
TOKENS = 16


def ids(tokenizer, *prompts):
    return tokenizer(list(prompts), return_tensors="pt").input_ids


def generated(model, inputs, **arguments):
    """Return the output of `generate` as a list of lists."""
    torch.manual_seed(0)
    result = model.generate(inputs, **{"max_new_tokens": TOKENS, "do_sample": False, **arguments})
    return getattr(result, "sequences", result).tolist()
