"""Scenarios of tests with a real vLLM. Each runs in a process of its own, because a process has one engine.

    python -m tests.hosts.vllm_scenarios NAME FILE

writes the results of a scenario to a file, as JSON.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest import mock

FOLDER = Path(__file__).parents[2] / "engine" / "models" / "assets" / "stdlib-7m"
PROMPTS = 20
MAX_TOKENS = 128
STOP = ["\n\n", "self."]
DEADLINE_S = 0.5


def prompts():
    lines = (FOLDER / "prompts.jsonl").read_text().splitlines()[:PROMPTS]
    return [json.loads(line)["prompt"] for line in lines]


@contextmanager
def sidecar(address, max_draft=16):
    """Run a sidecar; yield its process."""
    from tests.servers import served

    with served("--listen", address, "--capacity", "200k", "--max-draft", str(max_draft)) as process:
        yield process


@contextmanager
def socket(**settings):
    """Set the address of a sidecar, and other settings of the plug-in; yield the address."""
    with tempfile.TemporaryDirectory(prefix="ssd-") as folder:
        address = f"unix:{folder}/drafter.sock"
        os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": address, "deadline_s": DEADLINE_S, **settings})
        yield address


@contextmanager
def engine(drafts=None, **options):
    """Run an engine, with the plug-in if `drafts` is a number of draft tokens; yield it."""
    from vllm import LLM

    if drafts is not None:
        options["scheduler_cls"] = "drafter_service.plugins.vllm.Scheduler"
        options["speculative_config"] = {
            "method": "custom_class",
            "model": "drafter_service.plugins.vllm.NullProposer",
            "num_speculative_tokens": drafts,
        }
    options = {"max_model_len": 1024, **options}
    llm = LLM(str(FOLDER), dtype="float32", enforce_eager=True, disable_log_stats=False, **options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()


def generate(llm, texts, *, at_once=False, **params):
    """Return the completions of prompts, one request at a time or in one batch."""
    from vllm import SamplingParams

    sampling = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS, **params})
    batches = [texts] if at_once else [[text] for text in texts]
    return [completion.outputs[0] for batch in batches for completion in llm.generate(batch, sampling, use_tqdm=False)]


def tokens(completions):
    return [list(completion.token_ids) for completion in completions]


def counters(llm):
    """Return vLLM's own counters by name, without prefix."""
    return {
        metric.name.removeprefix("vllm:"): metric.values
        if hasattr(metric, "values")
        else getattr(metric, "value", None)
        for metric in llm.get_metrics()
    }


def session_of(llm):
    return llm.llm_engine.engine_core.engine_core.scheduler.ssd_session


def wait_for_connection(llm):
    drafter = session_of(llm).namespaces.find("", "").drafter
    until = time.monotonic() + 30
    while drafter.lost is not None and time.monotonic() < until:
        time.sleep(0.05)


def plain():
    with engine() as llm:
        return {
            "outputs": tokens(generate(llm, prompts())),
            "stopped": [completion.text for completion in generate(llm, prompts(), stop=STOP)],
        }


def drafts(**settings):
    with socket(**settings) as address, sidecar(address), engine(8) as llm:
        outputs = [tokens(generate(llm, prompts())) for _ in range(2)]
        counted = dict(vars(session_of(llm).counters))
        host_counters = counters(llm)
        return {
            "outputs": outputs,
            "counters": counted,
            "host_counters": {name: value for name, value in host_counters.items() if name.startswith("spec_decode")},
            "stopped": [completion.text for completion in generate(llm, prompts(), stop=STOP)],
            "report": report(address),
        }


def drafts_of_a_replica():
    return drafts(drafting="replica")


def report(address):
    """Return the report of a sidecar."""
    command = [sys.executable, "-m", "drafter_service.commands.main", "report", "--address", address, "--json"]
    return json.loads(subprocess.run(command, capture_output=True, check=True).stdout)


def changed_weights():
    """Do without drafts what `training` does with them."""
    with engine(enable_prefix_caching=True) as llm, other_weights() as folder:
        return trained(llm, folder)


def training():
    """Do what a trainer does to an engine between and within rollouts."""
    options = {"enable_prefix_caching": True, "async_scheduling": False}
    with socket(rollouts=True) as address, sidecar(address), engine(8, **options) as llm, other_weights() as folder:
        outputs = trained(llm, folder)
        session = session_of(llm)
        running = len(session)
        session.close()
        (namespace,) = report(address)["namespaces"]
        versions = {each["version"]: each["requests"] for each in namespace["by_version"]}
        return {**outputs, "running": running, "counters": vars(session.counters), "versions": versions}


def trained(llm, folder):
    """Outputs while a prefix cache is reset, an engine sleeps, and its weights are replaced by those of a folder."""
    core, outputs = llm.llm_engine, {}
    outputs["first"] = tokens(generate(llm, prompts(), at_once=True))
    outputs["reset within"] = reset_within(core)
    llm.sleep(level=1)
    outputs["asleep"] = core.engine_core.engine_core.is_sleeping()
    llm.wake_up()
    outputs["after sleep"] = tokens(generate(llm, prompts(), at_once=True))
    for version, (name, path) in enumerate((("other weights", folder), ("first weights", FOLDER)), 1):
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(path)})
        outputs["reset"] = llm.reset_prefix_cache()
        options = {"at_once": True, "extra_args": {"ssd_version": version}}
        outputs[name] = [tokens(generate(llm, prompts(), **options)) for _ in range(2)]
    return outputs


def reset_within(core):
    """Outputs of a batch, in the middle of which the prefix cache is reset and all requests are preempted."""
    from vllm import SamplingParams

    for at, prompt in enumerate(prompts()):
        core.add_request(str(at), prompt, SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS))
    finished, steps = {}, 0
    while core.has_unfinished_requests():
        for output in core.step():
            if output.finished:
                finished[int(output.request_id)] = list(output.outputs[0].token_ids)
        steps += 1
        if steps in (4, 8):
            assert core.reset_prefix_cache(reset_running_requests=True)
    return [finished[at] for at in range(PROMPTS)]


@contextmanager
def other_weights():
    """Yield a copy of the model with other weights."""
    import torch
    from safetensors.torch import load_file, save_file

    with tempfile.TemporaryDirectory(prefix="ssd-") as parent:
        folder = Path(parent) / "model"
        shutil.copytree(FOLDER, folder)
        weights = load_file(folder / "model.safetensors")
        noise = torch.Generator().manual_seed(0)
        changed = {name: each + 0.02 * torch.randn(each.shape, generator=noise) for name, each in weights.items()}
        save_file({name: each.to(weights[name].dtype) for name, each in changed.items()}, folder / "model.safetensors")
        yield folder


def long_drafts():
    with socket() as address, sidecar(address, 32), engine(32) as llm:
        outputs = [tokens(generate(llm, prompts())) for _ in range(2)]
        per_position = counters(llm)["spec_decode_num_accepted_tokens_per_pos"]
        return {"outputs": outputs, "accepted_at_last_position": per_position[31]}


def wrong_drafts():
    """Replace all drafts by other tokens of the vocabulary."""
    # vLLM for CPUs fails to start if numba was imported before.
    from drafter_service.plugins.session import HostSession

    draft = HostSession.draft

    def draft_wrongly(session, *batch):
        return [[(token + 1) % 4096 for token in tokens] for tokens in draft(session, *batch)]

    with (
        socket() as address,
        sidecar(address),
        engine(8) as llm,
        mock.patch.object(HostSession, "draft", draft_wrongly),
    ):
        outputs = tokens(generate(llm, prompts()))
        return {
            "outputs": [outputs],
            "verified": session_of(llm).counters.verified,
            "host_drafted": counters(llm)["spec_decode_num_draft_tokens"],
        }


def no_sidecar():
    """Start without a sidecar, which is started later."""
    with socket() as address, engine(8) as llm:
        outputs = [tokens(generate(llm, prompts()[:5]))]
        with sidecar(address):
            wait_for_connection(llm)
            outputs += [tokens(generate(llm, prompts()[:5])) for _ in range(2)]
            session_of(llm).close()
        return {"outputs": outputs, "counters": vars(session_of(llm).counters)}


def no_speculation():
    """Run with the plug-in's scheduler, and without a speculative configuration."""
    options = {"scheduler_cls": "drafter_service.plugins.vllm.Scheduler", "async_scheduling": False}
    with socket(), engine(**options) as llm:
        return {"outputs": [tokens(generate(llm, prompts()[:5]))]}


def other_tokenizer():
    """Run with a namespace that a client with another tokenizer uses."""
    from drafter_service.client import DrafterClient
    from drafter_service.observability.facts import ModelIdentity

    with socket() as address, sidecar(address):
        os.environ["SSD_PLUGIN"] = json.dumps({"sidecar": address, "namespace": "shared"})
        model = ModelIdentity("other", "another tokenizer", "", 4096)
        with DrafterClient(address, model=model, namespace="shared"), engine(8) as llm:
            return {"outputs": [tokens(generate(llm, prompts()[:5])) for _ in range(2)]}


SCENARIOS = {
    function.__name__: function
    for function in (
        plain,
        drafts,
        drafts_of_a_replica,
        changed_weights,
        training,
        long_drafts,
        wrong_drafts,
        no_sidecar,
        no_speculation,
        other_tokenizer,
    )
}


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(SCENARIOS[sys.argv[1]]()))
