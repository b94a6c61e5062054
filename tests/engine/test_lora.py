"""The engine with LoRA adapters: outputs equal those of merged models, in any batch and with any drafter."""

import numpy as np
import pytest

from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.registry import build_drafter
from engine.engine import build_engine
from engine.models.loader import load_model
from engine.models.lora.format import check_adapters
from engine.models.lora.pool import AdapterPool
from engine.models.tokenizer import Tokenizer
from engine.sampling.grammar_state import GrammarCompiler
from engine.scheduling.request import Request, SamplingParams
from ssd.config import DrafterConfig
from ssd.errors import UserError
from tests.engine.conftest import VOCAB, make_folder
from tests.engine.lora_folders import merged_model, write_adapter
from tests.engine.sampling.test_grammar_state import END, GRAMMARS
from tests.engine.test_core import outputs

CONFIG = EngineConfig(max_sequences=8, max_step_tokens=256, max_draft=6)
ADAPTERS = {
    "first": {"rank": 4},
    "second": {"rank": 9, "kinds": ("q_proj", "v_proj", "down_proj")},
    "third": {"rank": 1, "use_rslora": True},
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("lora") / "model"
    folder.mkdir()
    make_folder(folder)
    return folder


@pytest.fixture(scope="module")
def updates(folder):
    """Updates of each adapter, whose folders are in that of the model."""
    return {
        name: write_adapter(folder / name, folder, seed=seed, **settings)
        for seed, (name, settings) in enumerate(ADAPTERS.items())
    }


@pytest.fixture(scope="module")
def merged(folder, updates):
    """Outputs of all requests on models with merged weights, one at a time, without drafts."""
    expected = []
    for name in (None, *ADAPTERS):
        model = merged_model(folder, updates.get(name, {}))
        engine = build_engine(model, CONFIG, build_drafter("none", DrafterConfig()), grammars=compiler_of(folder))
        expected.append([engine.generate([without_adapter(request)])[0].tokens.tolist() for request in requests(name)])
    return [output for outputs in zip(*expected, strict=True) for output in outputs]


def compiler_of(folder):
    return GrammarCompiler(Tokenizer(folder), VOCAB, (END,))


def requests(name):
    """Requests with an adapter, the last one with a grammar; those of all adapters have the same prompts, two of which
    share three pages."""
    rng = np.random.default_rng(3)
    shared = rng.integers(1, 60, 48)
    prompts = [np.append(shared, 7), np.append(shared, 8), rng.integers(1, 60, 5), np.array([5])]
    settings = [SamplingParams(max_tokens=24)] * 3
    settings += [SamplingParams(max_tokens=40, temperature=0.9, grammar=GRAMMARS[0])]
    return [
        Request(prompt.astype(np.uint32), each, adapter=name) for prompt, each in zip(prompts, settings, strict=True)
    ]


def mixed_requests(names=(None, *ADAPTERS)):
    """Each prompt with all adapters in turn."""
    return [request for same in zip(*(requests(name) for name in names), strict=True) for request in same]


def without_adapter(request):
    return Request(request.prompt, request.sampling)


def new_engine(folder, *, drafter="none", config=CONFIG, **settings):
    model = load_model(folder)
    folders = {name: folder / name for name in ADAPTERS}
    target = TargetInfo.from_model(model, config, folder)
    built = build_drafter(drafter, DrafterConfig(), target, adapters=folders, **settings)
    pool = AdapterPool(model, check_adapters(folders, model.config))
    grammars = compiler_of(folder)
    return build_engine(model, config, built, adapters=pool, drafters=drafter.split("+"), grammars=grammars)


@pytest.mark.parametrize("drafter", ["none", "ngram", "ssd", "recycle", "lookahead", "self-int8", "mtp", "ssd+mtp"])
def test_outputs_equal_those_of_merged_models(folder, merged, draft_folders, drafter):
    engine = new_engine(folder, drafter=drafter, draft_models=draft_folders)
    submitted = mixed_requests()
    assert outputs(engine, submitted) == merged
    completions = engine.generate(submitted)  # repeats, so that drafters remember them and pages are shared
    assert [completion.tokens.tolist() for completion in completions] == merged
    assert all(completion.cached_tokens == 48 for completion in completions[:8])
    if drafter not in ("none", "ngram", "mtp", "lookahead"):  # random outputs rarely repeat their own n-grams
        assert sum(completion.accepted for completion in completions[:12]) > 0
    assert sum(completion.by_source["grammar"].accepted for completion in completions[12:]) > 10
    engine.close()


def test_preempted_sequences_keep_their_adapter(folder, merged):
    config = EngineConfig(max_sequences=8, max_step_tokens=256, max_draft=6, watermark=0.0)
    engine = new_engine(folder, config=config)
    pages = engine.scheduler.pages
    taken = pages.allocate(pages.count - 14)
    completions = engine.generate(mixed_requests())
    assert [completion.tokens.tolist() for completion in completions] == merged
    assert engine.scheduler.preemptions > 0
    pages.free(taken)
    engine.close()


@pytest.mark.parametrize("drafter", ["ssd", "classic", "ssd+ngram"])
def test_outputs_are_remembered_for_their_adapter_only(folder, updates, drafter):
    engine = new_engine(folder, drafter=drafter)
    engine.generate(requests("first"))
    drafters = engine.drafter.parts[0].drafter.inner if "+" in drafter else engine.drafter.inner
    corpora = {None: drafters.corpus} | {name: own.corpus for name, own in drafters._by_adapter.items()}
    assert [name for name, corpus in corpora.items() if corpus.appended] == ["first"]
    assert corpora["first"].capacity == DrafterConfig.capacity // len(ADAPTERS)
    engine.close()


def test_a_sidecar_has_a_namespace_for_each_adapter(folder, merged, server, socket_address):
    engine = new_engine(folder, drafter="ssd-remote", address=socket_address, warn=pytest.fail)
    submitted = mixed_requests()
    assert outputs(engine, submitted) == merged
    completions = engine.generate(submitted)
    assert [completion.tokens.tolist() for completion in completions] == merged
    drafters = engine.drafter.inner
    clients = [drafters._base, *drafters._by_adapter.values()]
    assert all(client._decided.wait(60) for client in clients)
    assert len({client.welcome.namespace for client in clients}) == 4
    engine.close()


def test_an_unknown_adapter_is_refused(folder, updates):
    engine = new_engine(folder)
    with pytest.raises(UserError, match=r"there is no adapter 'fourth'; there are first, second, third"):
        engine.add(requests("fourth")[0])
    engine.close()
    plain = build_engine(load_model(folder), CONFIG, build_drafter("none", DrafterConfig()))
    with pytest.raises(UserError, match="this engine has none; start it with --lora"):
        plain.add(requests("first")[0])
