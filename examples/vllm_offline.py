"""Drafts from a sidecar in vLLM 0.32, offline, here with the model that comes with this project.

    pip install .  # in vLLM's environment
    ssd-drafter serve &
    python examples/vllm_offline.py [unix:/tmp/ssd-drafter.sock]

Prints how many drafted tokens vLLM accepted in each of three passes over the same prompts, and fails if outputs differ.
The drafter learns how long steps take and drafts what is worth its time, so the first steps have few drafts on a slow
machine. A server gets the same options as flags; docs/hosts/vllm.md has them, and those for vLLM 0.33.
"""

import json
import os
import sys
from pathlib import Path

from vllm import LLM, SamplingParams

MODEL = Path(__file__).parents[1] / "engine" / "models" / "assets" / "stdlib-7m"
PROMPTS = ["def quicksort(items):", "import unittest\n\n\nclass Test"]


def count(llm, name):
    """Return one of vLLM's counters of speculative decoding."""
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:spec_decode_num_{name}_tokens")


def main(sidecar="unix:/tmp/ssd-drafter.sock"):
    os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": sidecar})
    llm = LLM(
        str(MODEL),
        dtype="float32",
        max_model_len=1024,
        enforce_eager=True,
        disable_log_stats=False,
        scheduler_cls="drafter_service.plugins.vllm.Scheduler",
        speculative_config={
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": 8,
        },
    )
    drafted, accepted, outputs = 0, 0, []
    for repeat in (1, 2, 3):
        completions = llm.generate(PROMPTS, SamplingParams(temperature=0.0, max_tokens=128), use_tqdm=False)
        outputs.append([completion.outputs[0].text for completion in completions])
        new = count(llm, "draft") - drafted, count(llm, "accepted") - accepted
        print(f"pass {repeat}: {new[1]} of {new[0]} drafted tokens accepted")
        drafted, accepted = drafted + new[0], accepted + new[1]
    assert outputs[0] == outputs[1] == outputs[2], "outputs differ"


if __name__ == "__main__":
    main(*sys.argv[1:])
