"""The table of kinds, names of drafters, and options."""

import sys

import numpy as np
import pytest

from drafter_service.client.replica import ReplicaClient
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import SHAPES
from engine.drafters.options import LookaheadOptions, read_options
from engine.drafters.registry import KINDS, build_drafter, check_kind, configure, describe_kinds, parse_kinds
from ssd.base import LONG_PROMPT
from ssd.baselines.ngram import NgramDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from tests.drafter_service.fake_server import FakeService, fake_server_thread
from tests.drafter_service.raw import eventually

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
    assert drafter.is_sorting
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
