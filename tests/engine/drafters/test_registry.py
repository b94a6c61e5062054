"""The table of kinds, names of drafters, and options."""

import sys

import numpy as np
import pytest

from drafter_service.client.replica import ReplicaClient
from drafter_service.transport.wire import SHAPES
from engine.drafters.registry import KINDS, build_drafter, check_kind, configure, describe_kinds, parse_kinds
from ssd.base import LONG_PROMPT
from ssd.baselines.ngram import NgramDrafter
from ssd.config import DrafterConfig
from ssd.errors import UserError
from tests.drafter_service.fake_server import FakeService, fake_server_thread
from tests.engine.drafters.kinds import EMBEDDED, config_of, target_of

CONFIG = DrafterConfig(capacity=5000)


class OwnDrafter(NgramDrafter):
    """A third-party drafter."""

    def __init__(self, config, target):
        super().__init__()
        self.made_with = config, target


OWN = f"{__name__}:OwnDrafter"


def test_every_kind_has_a_help_text():
    assert all(f"{name}: {kind.help}" in describe_kinds() for name, kind in KINDS.items())


@pytest.mark.parametrize("name", EMBEDDED)
def test_every_kind_can_be_built(name, corpus_file):
    build_drafter(name, config_of(name, corpus_file), target_of()).close()


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


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("eagle9", "unknown drafter 'eagle9'; give none, ngram, ssd"),
        ("", "unknown drafter ''"),
        (":Class", "unknown drafter ':Class'"),
        ("ssd+ssd", "each drafter may appear once, and `none` cannot be combined"),
        ("ssd+none", "each drafter may appear once, and `none` cannot be combined"),
        ("ssd+other", "unknown drafter 'other'"),
        ("no_such_module:Class", "--drafter no_such_module:Class: No module named 'no_such_module'"),
        (f"{__name__}:Absent", "has no Absent"),
    ],
)
def test_unknown_drafters_are_refused(name, message):
    with pytest.raises(UserError, match=message):
        build_drafter(name, CONFIG)


def test_combinations_are_parsed():
    assert parse_kinds(f"ssd+{OWN}") == ["ssd", OWN]
    assert parse_kinds("ngram") == ["ngram"]


def test_options_set_fields_of_the_configuration():
    given = {"match_depth": "8", "refresh_interval_s": "0.5"}
    config = configure("ssd+mtp", CONFIG, {**given, "depth": "3"})
    assert config.options == {"depth": "3"}
    assert (config.match_depth, config.refresh_interval_s) == (8, 0.5)


@pytest.mark.parametrize(
    ("kind", "option", "message"),
    [
        ("ssd", {"depth": "8"}, "the drafter ssd has no option depth; give capacity, "),
        ("ssd", {"match_depth": "x"}, "match_depth must be a number, not 'x'"),
        ("ssd", {"match_depth": "1000"}, "match_depth must be 1 to 64, not 1000"),
        ("ssd", {"max_draft": "8"}, "give --max-draft instead"),
        ("ngram", {"longest": "8"}, "the drafter ngram has no option longest; it has no options"),
    ],
)
def test_invalid_options_are_refused(kind, option, message):
    with pytest.raises(UserError, match=message):
        configure(kind, CONFIG, option)


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


def test_drafts_of_a_replica_are_an_option(socket_address, server, tmp_path):
    config = configure("ssd-remote", CONFIG, {"drafting": "replica", "deadline_s": "1"})
    check_kind("ssd-remote", config, None, tmp_path)
    drafter = build_drafter("ssd-remote", config, address=socket_address)
    assert isinstance(drafter, ReplicaClient)
    drafter.close()
    config = configure("ssd-remote", CONFIG, {"drafting": "here"})
    with pytest.raises(UserError, match="drafting must be 'sidecar' or 'replica', not 'here'"):
        check_kind("ssd-remote", config, None, tmp_path)


def test_the_deadline_of_a_sidecar_is_an_option(tmp_path):
    for text in ("0.25", "0"):
        check_kind("ssd-remote", configure("ssd-remote", CONFIG, {"deadline_s": text}), None, tmp_path)
    for text in ("-1", "inf", "soon"):
        config = configure("ssd-remote", CONFIG, {"deadline_s": text})
        with pytest.raises(UserError, match=f"deadline_s must be a number of seconds, not '{text}'"):
            check_kind("ssd-remote", config, None, tmp_path)
