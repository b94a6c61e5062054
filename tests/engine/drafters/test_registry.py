"""The table of kinds, names of drafters, options, and drafters from another package, contained if they fail."""

import sys
from dataclasses import replace

import numpy as np
import pytest

from drafter_service.client.replica import ReplicaClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import SHAPES
from engine.config import EngineConfig
from engine.drafters.base import TargetInfo
from engine.drafters.options import LookaheadOptions, read_options
from engine.drafters.registry import KINDS, build_drafter, check_kind, configure, describe_kinds, parse_kinds
from engine.drafters.sources import SOURCE_NAMES, DraftCounts, DraftSource, count_sources, counts_by_name, sum_by_name
from engine.engine import build_engine
from ssd.base import LONG_PROMPT
from ssd.baselines.ngram import NgramDrafter
from ssd.baselines.none import NoDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from ssd.types import Source
from tests.drafter_service.fake_server import FakeService, fake_server_thread
from tests.drafter_service.raw import eventually
from tests.engine.test_core import outputs, requests

CONFIG = DrafterConfig(capacity=5000)


class OwnDrafter(NgramDrafter):
    """A third-party drafter."""

    def __init__(self, config, target):
        super().__init__()
        self.made_with = config, target


OWN = f"{__name__}:OwnDrafter"


def test_every_kind_has_a_help_text():
    assert all(f"{name}: {kind.help}" in describe_kinds() for name, kind in KINDS.items())


def test_the_engine_does_not_wait_for_long_prompts_to_be_sorted():
    drafter = build_drafter("ssd", CONFIG)
    drafter.start(1, np.arange(2 * LONG_PROMPT, dtype=np.uint32))
    assert drafter._unsorted
    drafter.close()


def test_a_third_party_class_is_imported_and_gets_the_options():
    config = configure(OWN, CONFIG, {"width": "7"})
    drafter = build_drafter(OWN, config)
    assert drafter.made_with == (config, None)
    assert config.options == {"width": "7"}


REFUSED = [
    ("eagle9", {}, "unknown drafter 'eagle9'; give none, ngram, ssd"),
    ("", {}, "unknown drafter ''"),
    (":Class", {}, "unknown drafter ':Class'"),
    ("ssd+ssd", {}, "each drafter may appear once, and `none` cannot be combined"),
    ("ssd+none", {}, "each drafter may appear once, and `none` cannot be combined"),
    ("ssd+other", {}, "unknown drafter 'other'"),
    ("no_such_module:Class", {}, "--drafter no_such_module:Class: No module named 'no_such_module'"),
    (f"{__name__}:Absent", {}, "has no Absent"),
    ("ssd", {"depth": "8"}, "the drafter ssd has no option depth; give capacity, "),
    ("ssd", {"match_depth": "x"}, "match_depth must be a whole number, not 'x'"),
    ("ssd", {"match_depth": "1000"}, "match_depth must be 1 to 64, not 1000"),
    ("ssd", {"max_draft": "8"}, "give --max-draft instead"),
    ("ngram", {"longest": "8"}, "the drafter ngram has no option longest; it has no options"),
    ("lookahead", {"window": "x"}, "window must be a whole number, not 'x'"),
    ("lookahead", {"window": "1"}, "window must be 2 to 64, not 1"),
    ("lookahead", {"ngram": "1"}, "ngram must be 2 to 16, not 1"),
    ("lookahead", {"candidates": "0"}, "candidates must be 1 to 64, not 0"),
    ("mtp", {"depth": "0"}, "depth must be a whole number from 1, not 0"),
    ("ssd-remote", {"drafting": "here"}, "drafting must be 'sidecar' or 'replica', not 'here'"),
    *(("ssd-remote", {"deadline_s": text}, "deadline_s must be a number") for text in ("-1", "inf", "soon")),
    ("rest", {}, "--drafter rest: it needs a corpus; give --drafter-option path=SNAPSHOT"),
]


@pytest.mark.parametrize(("name", "options", "message"), REFUSED)
def test_names_and_options_that_cannot_be_used_are_refused(model_folder, draft_folders, name, options, message):
    """Most of them before the target is loaded."""

    def build():
        config = configure(name, CONFIG, options)
        for kind in parse_kinds(name):
            check_kind(kind, config, draft_folders.get(kind), model_folder)
        build_drafter(name, config)

    with pytest.raises(UserError, match=message):
        build()


def test_combinations_are_parsed():
    assert parse_kinds(f"ssd+{OWN}") == ["ssd", OWN]
    assert parse_kinds("ngram") == ["ngram"]


def test_options_set_fields_of_the_configuration():
    given = {"match_depth": "8", "refresh_interval_s": "0.5", "cost": "0.1"}
    config = configure("ssd+lookahead", CONFIG, {**given, "window": "9"})
    assert config.options == {"window": "9"}
    assert read_options(LookaheadOptions, config.options) == LookaheadOptions(window=9)
    assert (config.match_depth, config.refresh_interval_s, config.cost) == (8, 0.5, 0.1)


def test_the_table_imports_no_pytorch():
    """Importing PyTorch would delay help texts and errors."""
    import subprocess

    code = "import sys, engine.drafters.registry; print('torch' in sys.modules, 'numba' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.parametrize("shape", ["path", "tree"])
def test_a_sidecar_drafts_the_shape_that_the_engine_verifies(socket_address, shape):
    service = FakeService()
    with fake_server_thread(socket_address, service):
        drafter = build_drafter("ssd-remote", DrafterConfig(draft_shape=shape), address=socket_address)
        assert drafter.is_connected
        drafter.close()
    assert not drafter.is_connected
    assert SHAPES[service.requests[0].hello.draft_shape] == shape


def test_the_namespace_of_a_sidecar_is_told_and_can_be_given(socket_address):
    told, warned = [], []
    service = FakeService(held=pb.Held(other="b", other_tokens=7))
    config = configure("ssd-remote", CONFIG, {"namespace": "a"})
    with fake_server_thread(socket_address, service):
        drafter = build_drafter("ssd-remote", config, address=socket_address, notify=told.append, warn=warned.append)
        eventually(lambda: warned)
        drafter.close()
    assert told == ["drafts come from the namespace a (0 tokens)"]
    assert "namespace b holds 7 tokens" in warned[0]
    assert warned[0].endswith("give --drafter-option namespace=b")


def test_drafts_of_a_replica_are_an_option(socket_address, server, tmp_path):
    config = configure("ssd-remote", CONFIG, {"drafting": "replica", "deadline_s": "0"})
    check_kind("ssd-remote", config, None, tmp_path)
    drafter = build_drafter("ssd-remote", config, address=socket_address)
    assert isinstance(drafter, ReplicaClient)
    drafter.close()


# --- Sources of draft tokens


def test_codes_are_those_of_the_library_and_consecutive():
    assert [DraftSource(source).name for source in Source] == [source.name for source in Source]
    *known, other = DraftSource
    assert [int(source) for source in known] == list(range(len(known)))
    assert other > max(known)
    assert SOURCE_NAMES[:5] == ("corpus", "local", "fallback", "library", "draft-model")
    assert SOURCE_NAMES[-1] == "other"


def test_kinds_that_draft_neither_from_the_corpus_nor_from_the_own_text_have_a_source_of_their_name():
    assert KINDS.keys() - {"none", "ngram", "ssd", "ssd-remote", "classic"} <= set(SOURCE_NAMES)


def test_tokens_are_counted_by_source_and_unknown_codes_as_other():
    codes = np.random.default_rng(1).integers(0, 256, 500).astype(np.uint8)
    expected = [0] * len(SOURCE_NAMES)
    for code in codes.tolist():
        expected[code if code < DraftSource.GRAMMAR + 1 else -1] += 1
    assert count_sources(codes).tolist() == expected
    assert count_sources(codes[:0]).tolist() == [0] * len(SOURCE_NAMES)


def test_counts_have_the_names_of_sources_that_occurred():
    drafted, accepted = (
        count_sources(np.array(codes, np.uint8))
        for codes in ([DraftSource.MTP] * 5 + [255, 255, 99] + [0] * 3, [255, 0, 255])
    )
    assert counts_by_name(drafted, accepted) == {"corpus": (3, 1), "mtp": (5, 0), "other": (3, 2)}
    assert list(counts_by_name(drafted, accepted)) == ["corpus", "mtp", "other"]
    assert counts_by_name(*np.zeros((2, len(SOURCE_NAMES)), np.int64)) == {}


def test_counts_of_several_outputs_are_added():
    first, second = {"mtp": DraftCounts(4, 3)}, {"corpus": DraftCounts(2, 0), "mtp": DraftCounts(1, 1)}
    assert sum_by_name([first, {}, second]) == {"corpus": (2, 0), "mtp": (5, 4)}
    assert sum_by_name([]) == {}


# --- Drafters from another package

ENGINE = EngineConfig(max_sequences=4, max_step_tokens=128, max_draft=6)
REPEATER_SOURCE = '''
import numpy as np
from engine.drafters.base import Drafter, TargetOutputs
from engine.drafters.drafts import Drafts
from ssd.types import DraftBatch, offsets_of

NEEDS = {
    "top_k": TargetOutputs(top_k=10**6), "hidden_layers": TargetOutputs(hidden_layers=(99,)),
    "extra_rows": TargetOutputs(extra_rows=-1), "needs": None,
}

class Repeater(Drafter):
    """Drafts the last token twice, or fails in the way that its option `fault` names."""
    needs = TargetOutputs()

    def __init__(self, config, target):
        self.fault, self.vocab_size = config.options.get("fault"), target.vocab_size
        self.calls = 0
        if self.fault == "constructor":
            raise RuntimeError("no weights")
        if self.fault in NEEDS:
            self.needs = NEEDS[self.fault]

    def bind(self, forward):
        if self.fault == "bind":
            raise RuntimeError("no memory")

    def propose(self, plan):
        self.calls += 1
        if self.fault == "raises":
            raise RuntimeError("no idea")
        sizes = np.minimum(2, plan.rooms)
        last = [int(sequence.tokens[-1]) for sequence in plan.producing]
        tokens = np.repeat(np.array(last, np.uint32), sizes)
        parents = np.concatenate([np.arange(-1, size - 1) for size in sizes]).astype(np.int32)
        if self.fault == "cycle":
            parents += 1
        count = len(tokens)
        batch = DraftBatch(tokens, parents, np.ones(count, np.float32), np.zeros(count, np.uint8), offsets_of(sizes))
        return Drafts(batch)
'''
REPEATER = "repeating_drafter:Repeater"


@pytest.fixture
def package(tmp_path, monkeypatch):
    (tmp_path / "repeating_drafter.py").write_text(REPEATER_SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    sys.modules.pop("repeating_drafter", None)


def drafter_of(model, name=REPEATER, **options):
    target = TargetInfo.from_model(model, ENGINE)
    return build_drafter(name, configure(name, DrafterConfig(), options), target)


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize("fault", [None, "raises", "cycle"])
def test_outputs_do_not_depend_on_a_third_partys_drafter(model, fault, caplog):
    """Its faulty drafts are dropped, and reported once."""
    drafter = drafter_of(model, **({} if fault is None else {"fault": fault}))
    engine = build_engine(model, replace(ENGINE, verification="rejection"), drafter)
    completions = engine.generate(requests(6))
    plain = outputs(build_engine(model, ENGINE, NoDrafter()), requests(6))
    assert [each.tokens.tolist() for each in completions] == plain
    drafted = sum(each.drafted for each in completions)
    assert drafted > 20 if fault is None else drafted == 0
    assert drafter.calls > 1
    assert [record.name for record in caplog.records] == ["engine.drafters.guard"] * (fault is not None)
    caplog.clear()


@pytest.mark.usefixtures("package")
@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("constructor", "--drafter repeating_drafter:Repeater: RuntimeError: no weights"),
        ("bind", "Repeater cannot be used: RuntimeError: no memory"),
        ("top_k", "top_k must be 0 to"),
        ("hidden_layers", "hidden_layers must be ascending numbers"),
        ("extra_rows", "extra_rows must not be negative"),
        ("needs", "AttributeError"),
    ],
)
def test_a_drafter_that_cannot_start_gives_a_one_line_error(model, fault, message, caplog):
    with pytest.raises(UserError, match=message) as problem:
        build_engine(model, ENGINE, drafter_of(model, fault=fault))
    assert "\n" not in str(problem.value)
    caplog.clear()


@pytest.mark.usefixtures("package")
def test_a_module_in_the_current_folder_is_found(model, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry not in ("", str(tmp_path))])
    monkeypatch.chdir(tmp_path)
    assert drafter_of(model).calls == 0
