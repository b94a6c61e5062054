"""The call of `generate` with the plug-in, in the installed version of transformers, with the shipped model."""

import inspect
import re
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import transformers
from transformers import GenerationConfig, GenerationMixin

from drafter_service.client.identity import model_identity
from drafter_service.plugins.transformers import SsdGenerate
from drafter_service.plugins.transformers.support import PRIVATE_NAMES, TESTED
from tests.drafter_service.plugins.helpers import corpus_of, session_of
from tests.drafter_service.plugins.transformers.generation import FOLDER, PROMPTS, TOKENS, generated, ids


class RecordingStreamer:
    def __init__(self, fails_at=1 << 30):
        self.tokens, self.ends, self.fails_at = [], 0, fails_at

    def put(self, value):
        self.tokens += value.flatten().tolist()
        if len(self.tokens) > self.fails_at:
            raise RuntimeError("the reader is gone")

    def end(self):
        self.ends += 1


def test_the_installed_version_is_a_tested_one_and_has_the_private_names():
    assert transformers.__version__.rpartition(".")[0] in TESTED
    assert all(hasattr(GenerationMixin, name) for name in PRIVATE_NAMES)
    given = set(inspect.signature(GenerationMixin._assisted_decoding).parameters)
    assert given >= {"input_ids", "logits_processor", "stopping_criteria", "generation_config", "streamer"}
    assert "streamer" in inspect.signature(GenerationMixin.generate).parameters


def test_scores_are_those_of_plain_decoding(model, tokenizer, ssd):
    arguments = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True, "output_scores": True}
    inputs = ids(tokenizer, PROMPTS[0])
    plain, drafted = (model.generate(inputs, **arguments, **more) for more in ({}, {"custom_generate": ssd}))
    assert len(plain.scores) == len(drafted.scores)
    assert all(torch.allclose(one, other, atol=1e-3) for one, other in zip(plain.scores, drafted.scores, strict=True))


@pytest.mark.parametrize("batch", [1, 2])
def test_a_streamer_gets_all_tokens_and_the_end(model, tokenizer, ssd, batch):
    """A streamer does not go with a batch, in the host either; the plug-in must not swallow it."""
    streamer, inputs = RecordingStreamer(), ids(tokenizer, *PROMPTS[:1] * batch)
    output = generated(model, inputs, custom_generate=ssd, streamer=streamer)
    assert streamer.ends == 1
    if batch == 1:
        assert streamer.tokens == output[0]
        assert ssd.counters.steps > 0


@pytest.mark.parametrize("arguments", [{}, {"synced_gpus": True}, {"synced_gpus": True, "num_beams": 2}])
def test_processes_that_run_each_step_together_have_no_drafts(model, tokenizer, ssd, log, monkeypatch, arguments):
    """Without an argument, the host decides by the model."""
    if not arguments:
        monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
        monkeypatch.setattr("torch.distributed.get_world_size", lambda: 2)
        monkeypatch.setattr(model, "_is_fsdp_managed_module", True, raising=False)
    seen = []

    def has_unfinished(_, this_peer_finished, synced_gpus, device):
        seen.append(synced_gpus)
        return not this_peer_finished

    monkeypatch.setattr(GenerationMixin, "_has_unfinished_sequences", has_unfinished)
    generated(model, ids(tokenizer, PROMPTS[0]), custom_generate=ssd, **arguments)
    assert set(seen) == {True}
    assert ssd.counters.steps == 0
    assert len(log) == 1


def test_a_request_whose_reader_is_gone_ends(model, tokenizer, ssd):
    inputs = ids(tokenizer, PROMPTS[0])
    with pytest.raises(RuntimeError, match="the reader is gone"):
        generated(model, inputs, custom_generate=ssd, streamer=RecordingStreamer(inputs.shape[1] + 5))
    assert session_of(ssd).running == 0
    assert corpus_of(session_of(ssd)).tokens == 0


def test_private_text_is_not_learned(model, tokenizer, ssd):
    generated(model, ids(tokenizer, PROMPTS[0]), custom_generate=ssd, ssd_private=True, ssd_session="chat")
    assert corpus_of(session_of(ssd)).tokens == 0


def test_within_the_block_generate_uses_drafts(model, tokenizer, ssd):
    inputs = ids(tokenizer, PROMPTS[0])
    plain = generated(model, inputs)
    with ssd.enabled():
        with ssd.enabled():
            assert generated(model, inputs) == plain
        steps = ssd.counters.steps
        assert steps > 0
        assert generated(model, inputs) == plain
        assert ssd.counters.steps > steps
        steps = ssd.counters.steps
        stopped = generated(model, inputs, stop_strings=["items"], tokenizer=tokenizer)
        assert ssd.counters.steps == steps
    assert stopped == generated(model, inputs, stop_strings=["items"], tokenizer=tokenizer)
    assert "generate" not in vars(model)
    assert generated(model, inputs) == plain
    assert ssd.counters.steps == steps


def test_blocks_may_overlap(model, tokenizer, ssd):
    inputs = ids(tokenizer, PROMPTS[0])
    with SsdGenerate(model, sidecar="embedded", capacity=20_000) as other:
        blocks = [ssd.enabled(), ssd.enabled(), other.enabled()]
        for block in blocks:
            block.__enter__()
        blocks[0].__exit__(None, None, None)
        generated(model, inputs)
        assert (ssd.counters.steps, other.counters.steps > 0) == (0, True)
        blocks[2].__exit__(None, None, None)
        generated(model, inputs)
        assert ssd.counters.steps > 0
        blocks[1].__exit__(None, None, None)
        steps = ssd.counters.steps, other.counters.steps
        assert "generate" not in vars(model)
        generated(model, inputs)
        assert (ssd.counters.steps, other.counters.steps) == steps


def test_a_config_without_its_name_is_read_within_the_block(model, tokenizer, ssd):
    inputs = ids(tokenizer, PROMPTS[0])
    config = GenerationConfig(max_new_tokens=TOKENS, do_sample=False, stop_strings=["items"])
    plain = model.generate(inputs, config, tokenizer=tokenizer)
    with ssd.enabled():
        assert torch.equal(model.generate(inputs, config, tokenizer=tokenizer), plain)
        assert ssd.counters.steps == 0
        model.generate(inputs, GenerationConfig(max_new_tokens=TOKENS, do_sample=False))
        assert ssd.counters.steps > 0


def test_a_cache_of_an_earlier_call_is_decoded_without_drafts(model, tokenizer, ssd, log):
    inputs = ids(tokenizer, PROMPTS[0])
    outputs = []
    for more in ({}, {"custom_generate": ssd}):
        first = model.generate(inputs, max_new_tokens=4, do_sample=False, return_dict_in_generate=True)
        outputs.append(generated(model, first.sequences, past_key_values=first.past_key_values, **more))
    assert outputs[0] == outputs[1]
    assert "earlier call" in log[0]


def test_an_untested_version_is_not_used(model, tokenizer, log, monkeypatch):
    monkeypatch.setattr("drafter_service.plugins.transformers.support.TESTED", ("0.1",))
    inputs = ids(tokenizer, PROMPTS[0])
    with SsdGenerate(model, sidecar="embedded") as ssd:
        assert generated(model, inputs, custom_generate=ssd) == generated(model, inputs)
        assert ssd.counters.steps == 0
    assert log == [
        f"ssd-drafter: transformers {transformers.__version__} was not tested, only 0.1; decoding without drafts"
    ]


def test_a_model_is_identified_by_its_folder(model, log):
    with SsdGenerate(model, sidecar="embedded") as ssd:
        assert session_of(ssd).namespaces._settings.model == model_identity(FOLDER)
        # No kernel is compiled in the first request.
        assert session_of(ssd).namespaces.opened["", ""].drafter is not None
    with SsdGenerate(model, sidecar="embedded", folder="/nonexistent") as ssd:
        assert session_of(ssd).namespaces._settings.model.tokenizer == ""
    assert "/nonexistent" in log[0]


def test_threads_share_one_connection(model, tokenizer, ssd):
    inputs = [ids(tokenizer, prompt) for prompt in PROMPTS]
    plain = [generated(model, each) for each in inputs]
    with ThreadPoolExecutor(len(inputs)) as pool:
        assert list(pool.map(lambda each: generated(model, each, custom_generate=ssd), inputs)) == plain


def test_the_documented_example_runs(socket_address, server, monkeypatch, capsys):
    page = FOLDER.parents[3] / "docs" / "hosts" / "transformers.md"
    monkeypatch.chdir(page.parents[2])
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    exec(example.replace("unix:/tmp/ssd-drafter.sock", socket_address).replace("=64", f"={TOKENS}"), {})
    assert "failures=0" in capsys.readouterr().out
