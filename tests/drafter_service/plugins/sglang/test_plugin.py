"""The parts of the plug-in for SGLang that need none of the host's classes; `test_conformance.py` has the others."""

import subprocess
import sys
import tomllib
from array import array
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import drafter_service
from drafter_service.plugins.draft import Draft
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.sglang import algorithm
from drafter_service.plugins.sglang.worker import BatchDrafts, JoinedText, accepted_tokens, ancestors, options_of

NODES = 5
LOOP = [1, 2, 3, 1, 2, 3, 1, 2]


class Request(SimpleNamespace):
    """The attributes of a host's request that the plug-in reads."""

    def __init__(self, rid="a", prompt=LOOP, output=(), **sampling):
        super().__init__(
            rid=rid,
            origin_input_ids_unpadded=array("q", prompt),
            output_ids=array("q", output),
            output_ids_through_stop=array("q", output),
            sampling_params=SimpleNamespace(
                **{"max_new_tokens": 50, "custom_params": None, "ignore_eos": False, "stop_token_ids": None, **sampling}
            ),
            tokenizer=None,
            eos_token_ids={40},
            finished_reason=None,
            cache_salt=None,
            extra_key=None,
            lora_id=None,
            session_id=None,
        )


@pytest.fixture
def session():
    reports = []
    session = HostSession(PluginSettings("embedded", capacity=20_000), HostLimits(NODES - 1, 50), reports.append)
    session.reports = reports
    yield session
    session.close()


@pytest.fixture
def drafts(session):
    return BatchDrafts(session, NODES)


def batch_of(*requests):
    return SimpleNamespace(reqs=list(requests), grammar_needs_sync=lambda: False)


def test_the_package_registers_the_plug_in():
    project = tomllib.loads((Path(drafter_service.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is algorithm.register


def test_servers_with_other_algorithms_load_little():
    code = "import sys, drafter_service.plugins.sglang.algorithm; print({'grpc', 'numpy'} & set(sys.modules) or 'none')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "none\n"


def test_tokens_of_the_step_before_are_read_with_overlap():
    torch = pytest.importorskip("torch")
    batch = batch_of(Request(), Request("b"))
    batch.spec_info = SimpleNamespace(
        accept_tokens=torch.tensor([1, 2, -1, 3, -1, -1], dtype=torch.int32), accept_lens=torch.tensor([2, 1])
    )
    assert accepted_tokens(batch, is_overlapped=True) == [[1, 2], [3]]
    assert accepted_tokens(batch, is_overlapped=False) == [[], []]
    batch.grammar_needs_sync = lambda: True
    assert accepted_tokens(batch, is_overlapped=True) == [[], []]


def test_padding_is_not_counted_as_verified(session, drafts):
    request = Request(max_new_tokens=3)
    assert drafts.nodes([request], [[]])[0].tolist() == [[2, 3, 1, 0, 0]]
    request.output_ids.extend([3, 4])
    assert drafts.nodes([request], [[]])[0].tolist() == [[4, 0, 0, 0, 0]]
    assert (session.counters.drafted, session.counters.verified, session.counters.accepted) == (2, 2, 1)


def test_a_tree_is_padded_after_its_last_node(session, drafts, monkeypatch):
    tree = Draft([5, 6, 7], [-1, -1, 1])
    monkeypatch.setattr(session, "draft_trees", lambda texts: [tree])
    tokens, parents = drafts.nodes([Request()], [[]])
    assert tokens.tolist() == [[2, 5, 6, 7, 0]]
    assert parents.tolist() == [[-1, 0, 0, 2, 3]]
    assert ancestors(parents).reshape(NODES, NODES).astype(int).tolist() == [
        [1, 0, 0, 0, 0],
        [1, 1, 0, 0, 0],
        [1, 0, 1, 0, 0],
        [1, 0, 1, 1, 0],
        [1, 0, 1, 1, 1],
    ]


@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": {41}}, {"ignore_eos": True}])
def test_no_drafts_after_a_stop_token(session, drafts, sampling):
    stop = 41 if "stop_token_ids" in sampling else 40
    request = Request(**sampling)
    nodes = drafts.nodes([request], [[3, stop, 1]])
    assert nodes[0, 0, 0] == 1
    assert ("a" in session) == ("ignore_eos" in sampling)


def test_a_request_of_the_same_id_is_a_new_one(session, drafts):
    requests = [Request(), Request(prompt=[5, 6, 5])]
    drafts.nodes(requests[:1], [[]])
    assert drafts.nodes(requests[1:], [[]])[0, 0, :2].tolist() == [5, 6]
    assert not session.reports


def test_caches_that_the_host_separates_share_no_corpus():
    salts = set()
    for salt, key in ((None, None), ("a", None), ("a", "b"), ("ab", None), ("b", "a"), ("1:a", "b")):
        request = Request()
        request.cache_salt, request.extra_key = salt, key
        salts.add(options_of(request).salt)
    assert len(salts) == 6


@given(st.lists(st.lists(st.integers(0, 9), max_size=4), max_size=4), st.data())
def test_a_joined_text_is_a_sequence(parts, data):
    text, expected = JoinedText(*(array("q", part) for part in parts)), [*chain(*parts)]
    assert list(text) == expected
    bound = st.none() | st.integers(-20, 20)
    start, stop = data.draw(bound), data.draw(bound)
    assert text[start:stop] == expected[start:stop]
    for index in range(-len(expected), len(expected)):
        assert text[index] == expected[index]
    with pytest.raises(IndexError):
        text[len(expected)]
