"""The plug-in for SGLang with stand-ins that are made of the host's recorded signatures.

`test_conformance.py` has the tests with the host's own classes.
"""

import gc
import subprocess
import sys
import tomllib
from array import array
from importlib.metadata import EntryPoint
from itertools import chain
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import drafter_service
from drafter_service.plugins.draft import Draft
from drafter_service.plugins.options import HostLimits
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.sglang import algorithm, worker
from drafter_service.plugins.sglang.batch import BatchDrafts, JoinedText, accepted_tokens, ancestors, options_of
from tests.drafter_service.plugins import signatures

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


@pytest.fixture
def host(monkeypatch):
    """Put the host's recorded modules in place."""
    signatures.stand_in(signatures.load("sglang"), monkeypatch)
    from sglang.srt.speculative.ngram_worker import NGRAMWorker

    def initialize(self, server_args, gpu_id, nccl_port, target_worker):
        self.server_args, self.model_runner = server_args, target_worker.model_runner
        self.draft_token_num, self.enable_overlap, self.topk = NODES, False, 1

    monkeypatch.setattr(NGRAMWorker, "__init__", initialize)
    monkeypatch.setenv("SSD_PLUGIN", '{"sidecar": "embedded", "capacity": 20000}')


def new_worker(monkeypatch, **group):
    monkeypatch.setattr(
        "sglang.srt.runtime_context.get_parallel", lambda: SimpleNamespace(tp_group=SimpleNamespace(**group))
    )
    runner = SimpleNamespace(model_config=SimpleNamespace(vocab_size=50, context_len=100))
    return worker.worker_class()(
        server_args=SimpleNamespace(model_path="m"),
        gpu_id=0,
        nccl_port=0,
        target_worker=SimpleNamespace(model_runner=runner),
    )


def batch_of(*requests):
    return SimpleNamespace(reqs=list(requests), grammar_needs_sync=lambda: False)


def test_the_package_registers_the_plug_in():
    project = tomllib.loads((Path(drafter_service.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    ((name, value),) = project["entry-points"]["sglang.srt.plugins"].items()
    assert EntryPoint(name, value, "sglang.srt.plugins").load() is algorithm.register


def test_servers_with_other_algorithms_load_little():
    code = "import sys, drafter_service.plugins.sglang.algorithm; print({'grpc', 'numpy'} & set(sys.modules) or 'none')"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "none\n"


def test_overridden_methods_have_the_signatures_of_the_host(host, monkeypatch):
    recorded = signatures.load("sglang")["sglang.srt.speculative.ngram_worker"]["NGRAMWorker"]
    worker_class = worker.worker_class()
    overridden = set(recorded) - {"__init__"}
    assert set(vars(worker_class)) >= overridden
    assert {name: signatures.signature_text(vars(worker_class)[name]) for name in overridden} == {
        name: recorded[name] for name in overridden
    }


def test_the_algorithm_is_registered_with_the_methods_of_ngram(host, monkeypatch):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
    from sglang.srt.speculative.spec_registry import CustomSpecAlgo

    registered = []

    def register(name, **options):
        return lambda factory: registered.append((name, options, factory))

    ngram = SpeculativeAlgorithm()
    monkeypatch.setattr(ngram, "is_ngram", lambda: "asked NGRAM", raising=False)
    monkeypatch.setattr(SpeculativeAlgorithm, "NGRAM", ngram, raising=False)
    monkeypatch.setattr(SpeculativeAlgorithm, "register", register)
    algorithm.register()
    ((name, options, factory),) = registered
    assert name == "SSD"
    assert options["supports_overlap"]
    spec_class = options["spec_class"]
    assert issubclass(spec_class, CustomSpecAlgo)
    assert spec_class.is_ngram(None) == "asked NGRAM"
    assert spec_class.create_worker is CustomSpecAlgo.create_worker
    assert factory(None).__name__ == "SsdWorker"


def test_a_worker_hands_over_paths(host, monkeypatch):
    own = new_worker(monkeypatch, rank_in_group=0, world_size=1)
    request = Request(output=[3])
    tokens, mask = own._prepare_draft_tokens(batch_of(request, Request("b", [7])))
    assert tokens.dtype == np.int64
    assert tokens.tolist() == [3, 1, 2, 3, 1, 7, 0, 0, 0, 0]
    assert mask.dtype == bool
    assert (mask.reshape(2, NODES, NODES) == np.tri(NODES, dtype=bool)).all()
    own._update_ngram_corpus(batch_of(request))
    own.clear_cache_pool()
    own.note_request_finished(rid="a", natural_stop=True)
    own.note_request_finished(rid="unknown", natural_stop=True)
    session = own._ssd_drafts._session
    assert "b" in session
    assert "a" not in session
    session.close()


def test_one_rank_drafts_for_all(host, monkeypatch):
    sent = []

    def broadcast(nodes, group):
        if group.rank_in_group == 0:
            sent.append(nodes.copy())
        else:
            nodes[:] = sent[-1]

    monkeypatch.setattr(worker, "broadcast", broadcast)
    workers = [new_worker(monkeypatch, rank_in_group=rank, world_size=2) for rank in range(2)]
    first, second = (each._prepare_draft_tokens(batch_of(Request())) for each in workers)
    assert first[0].tolist() == second[0].tolist() == [2, 3, 1, 2, 3]
    assert (first[1] == second[1]).all()
    assert workers[1]._ssd_drafts is None
    for each in workers:
        each.note_request_finished(rid="a", natural_stop=True)


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


def test_accepted_branches_of_trees_are_counted():
    """A target that continues a text in two ways: the drafts have both."""
    session = HostSession(PluginSettings("embedded", capacity=20_000), HostLimits(NODES - 1, 50, trees=True), print)
    drafts = BatchDrafts(session, NODES)
    turns = ([7, 8, 9], [7, 20, 21])
    committed = 0
    for rid in range(6):
        request = Request(str(rid), [30 + rid, 7], max_new_tokens=11)
        expected = [7, *turns[rid % 2][1:]] * 4
        while len(request.output_ids) < len(expected) - 1:
            tokens, parents = (row[0].tolist() for row in drafts.nodes([request], [[]]))
            node = 0
            while node is not None:
                request.output_ids.append(expected[len(request.output_ids) + 1])
                children = [child for child in range(NODES) if parents[child] == node]
                node = next((child for child in children if tokens[child] == request.output_ids[-1]), None)
                if len(request.output_ids) == len(expected) - 1:
                    break
        request.output_ids_through_stop = request.output_ids
        drafts.finish(request.rid)
        committed += len(request.output_ids)
        session._namespaces.find("", "").drafter.corpus.refresh()
    counters = session.counters
    assert counters.accepted + counters.steps == committed
    assert counters.accepted > counters.steps
    assert counters.failures == 0
    session.close()


@pytest.mark.parametrize("sampling", [{}, {"stop_token_ids": {41}}, {"ignore_eos": True}])
def test_no_drafts_after_a_stop_token(session, drafts, sampling):
    stop = 41 if "stop_token_ids" in sampling else 40
    request = Request(**sampling)
    nodes = drafts.nodes([request], [[3, stop, 1]])
    assert nodes[0, 0, 0] == 1
    assert ("a" in session) == ("ignore_eos" in sampling)


def test_the_end_of_a_request_that_the_host_has_dropped_is_recorded(session, drafts):
    drafts.nodes([Request()], [[]])
    assert "a" in session
    drafts.finish("a")
    assert "a" not in session


def test_a_request_that_the_host_drops_without_reporting_it_ends_when_another_begins(session, drafts):
    drafts.nodes([Request()], [[]])
    gc.collect()
    drafts.nodes([Request(rid="b")], [[]])
    assert ("a" in session, "b" in session) == (False, True)


def test_a_request_of_the_same_id_is_a_new_one(session, drafts):
    requests = [Request(), Request(prompt=[5, 6, 5])]
    drafts.nodes(requests[:1], [[]])
    assert drafts.nodes(requests[1:], [[]])[0, 0, :2].tolist() == [5, 6]
    assert not session.reports


def test_a_failure_costs_drafts_and_is_reported_once(session, drafts):
    broken = Request()
    del broken.lora_id
    for _ in range(2):
        assert drafts.nodes([broken], [[7]])[0].tolist() == [[7, 0, 0, 0, 0]]
    assert session.counters.failures == 1
    assert len(session.reports) == 1
    assert "AttributeError at batch.py" in session.reports[0]


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
