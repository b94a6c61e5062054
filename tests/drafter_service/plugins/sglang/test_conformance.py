"""The plug-in for SGLang with the host's own Python classes; the kernels that its worker calls are written out here.

Skipped where SGLang is not installed.
"""

import json
from array import array
from importlib.metadata import EntryPoint, EntryPoints, version
from inspect import isfunction
from types import SimpleNamespace

import pytest
import torch

from drafter_service.plugins.options import End, HostLimits
from drafter_service.plugins.settings import PluginSettings
from drafter_service.plugins.sglang import worker
from drafter_service.plugins.sglang.algorithm import TESTED
from drafter_service.plugins.sglang.worker import open_session
from tests.drafter_service.plugins.sglang.host import import_sglang
from tests.drafter_service.raw import eventually

NODES = 6
VOCAB_SIZE = 100
STOP = 99


@pytest.fixture(scope="module", autouse=True)
def _host():
    import_sglang()


@pytest.fixture
def algorithm(monkeypatch):
    """Return the registered algorithm, as the host finds it."""
    from sglang.srt import plugins
    from sglang.srt.speculative import spec_registry
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    entry = EntryPoint("ssd", "drafter_service.plugins.sglang.algorithm:register", plugins.GENERAL_PLUGINS_GROUP)
    monkeypatch.setattr(plugins, "entry_points", lambda group: EntryPoints([entry]).select(group=group))
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    monkeypatch.setattr(spec_registry, "_REGISTRY", {})
    plugins.load_plugins()
    return SpeculativeAlgorithm.from_string("ssd")


def server_args(**more):
    from sglang.srt.server_args import ServerArgs

    # The host resolves no arguments of a dummy model.
    return ServerArgs(model_path="dummy", speculative_algorithm="SSD", device="cpu", **more)


def resolved(arguments):
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.arg_groups.speculative_hook import handle_speculative_decoding

    handle_speculative_decoding(arguments)
    return resolving_view(arguments)


def test_the_host_is_a_tested_version():
    assert version("sglang") in TESTED


def test_the_algorithm_answers_all_questions_as_ngram(algorithm):
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    assert algorithm.name == "SSD"
    assert algorithm.supports_overlap
    questions = [
        name for name in vars(SpeculativeAlgorithm) if name.startswith(("is_", "supports_", "has_", "carries_"))
    ]
    assert len(questions) > 15
    for name in [*questions, "need_topk"]:
        assert getattr(algorithm, name)() == getattr(SpeculativeAlgorithm.NGRAM, name)()
    public = [name for name, value in vars(SpeculativeAlgorithm).items() if isfunction(value) and name[0] != "_"]
    assert all(hasattr(algorithm, name) for name in public)


def test_arguments_are_completed(algorithm):
    view = resolved(server_args())
    assert (view.speculative_num_draft_tokens, view.speculative_num_steps, view.speculative_eagle_topk) == (12, 11, 1)
    assert view.max_running_requests == 48
    assert view.disable_overlap_schedule
    view = resolved(server_args(speculative_num_draft_tokens=20, max_running_requests=7))
    assert (view.speculative_num_draft_tokens, view.speculative_num_steps, view.max_running_requests) == (20, 19, 7)
    assert resolved(server_args(speculative_eagle_topk=4)).speculative_eagle_topk == 4


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [
        ({"speculative_num_draft_tokens": 99}, "must be 2 to 65, not 99"),
        ({"pp_size": 2}, "pipeline-parallel"),
        ({"enable_dp_attention": True}, "dp-attention"),
        ({"speculative_ngram_external_corpus_path": "x"}, "ssd-drafter warm"),
        ({"speculative_eagle_topk": 4, "page_size": 16, "attention_backend": "triton"}, "needs --page-size 1"),
    ],
)
def test_arguments_that_are_not_supported_are_refused(algorithm, arguments, reason):
    with pytest.raises(ValueError, match=reason):
        resolved(server_args(**arguments))


def test_an_untested_version_and_unreadable_settings_are_refused(algorithm, monkeypatch):
    monkeypatch.setenv("SSD_PLUGIN", '{"adress": "unix:/tmp/x"}')
    with pytest.raises(ValueError, match="there is no setting adress"):
        resolved(server_args())
    monkeypatch.setattr("drafter_service.plugins.sglang.algorithm.TESTED", ("0.1",))
    with pytest.raises(ValueError, match=r"SGLang 0\.5\.23 was not tested, only 0\.1"):
        resolved(server_args())


def target(text):
    """Return the target's next token: a loop with a turn here and there, and an end."""
    if len(text) % 37 == 0:
        return STOP
    return (text[-1] * 3 + text[-2] + (len(text) % 11 == 0)) % 7


def plain(prompt, max_tokens, stop=STOP):
    """Return the output without drafts."""
    text = list(prompt)
    while len(text) - len(prompt) < max_tokens and (len(text) == len(prompt) or text[-1] != stop):
        text.append(target(text))
    return text[len(prompt) :]


class Server:
    """The host's worker and requests, and a scheduler that may process the results of a step after the next one."""

    def __init__(self, monkeypatch, worker_class, is_overlapped, width):
        from sglang.srt.speculative import ngram_worker

        self.is_overlapped, self.requests, self.finished = is_overlapped, {}, []
        self.steps = self.branches = 0
        spec = SimpleNamespace(
            **{f"speculative_ngram_{name}": None for name in ("min_bfs_breadth", "max_bfs_breadth", "match_type")},
            **{f"speculative_ngram_{name}": None for name in ("capacity", "max_trie_depth", "external_sam_budget")},
            **{f"speculative_ngram_external_corpus_{name}": None for name in ("max_tokens", "path")},
            speculative_num_draft_tokens=NODES,
            speculative_eagle_topk=width,
            speculative_num_steps=NODES - 1,
        )
        schedule = SimpleNamespace(disable_overlap_schedule=not is_overlapped, page_size=1)
        for name, value in {
            "get_spec": lambda: spec,
            "get_schedule": lambda: schedule,
            "get_device": lambda: SimpleNamespace(device="cpu"),
            "reconstruct_indices_from_tree_mask_func": reconstruct,
            "assign_extend_cache_locs_func": lambda **_: None,
            "prepare_mamba_track_for_verify": lambda _: None,
            "commit_mamba_states_after_verify": lambda *_: None,
            "move_accept_tokens_to_target_kvcache": lambda *_: None,
            "record_stream_for_v2_verify": lambda *_: None,
            "set_time_batch": lambda *_, **__: None,
            "eagle_sample": self.verify,
        }.items():
            assert hasattr(ngram_worker, name)
            monkeypatch.setattr(ngram_worker, name, value)
        model = SimpleNamespace(vocab_size=VOCAB_SIZE, context_len=4096)
        runner = SimpleNamespace(model_config=model, max_running_requests=8, watermark_state=None)
        target_worker = SimpleNamespace(
            model_runner=runner,
            get_memory_pool=lambda: (None, None),
            forward_batch_generation=lambda *_, **__: SimpleNamespace(logits_output=logits(), can_run_cuda_graph=False),
        )
        arguments = SimpleNamespace(model_path="dummy", revision=None)
        self.worker = worker_class(server_args=arguments, gpu_id=0, nccl_port=0, target_worker=target_worker)
        self.worker.alloc_memory_pool()
        self.session = self.worker._ssd_drafts and self.worker._ssd_drafts.session

    def add(self, rid, prompt, max_tokens, **more):
        from sglang.srt.managers.schedule_batch import Req
        from sglang.srt.sampling.sampling_params import SamplingParams

        sampling = SamplingParams(max_new_tokens=max_tokens, custom_params=more.pop("custom_params", None))
        sampling.normalize(None)
        request = Req(rid, "", array("q", prompt), sampling, eos_token_ids={STOP}, vocab_size=VOCAB_SIZE, **more)
        # The step that computes the prompt gives one token.
        request.pending = [[target(list(prompt))]]
        if not self.is_overlapped:
            self.commit(request)
        self.requests[rid] = request
        return request

    def run(self, rids=None):
        """Run steps until all requests, or those given, have ended; return their outputs."""
        rids = list(self.requests) if rids is None else rids
        requests = [self.requests[rid] for rid in rids]
        while running := [request for request in requests if not request.finished()]:
            self.step(running)
        return [list(request.output_ids_through_stop) for request in requests]

    def step(self, requests):
        from sglang.srt.model_executor.forward_batch_info import ForwardMode
        from sglang.srt.speculative.ngram_info import NgramVerifyInput

        self.steps += 1
        ready = [request.pending[-1] if self.is_overlapped else [] for request in requests]
        rows = [tokens + [-1] * (NODES - len(tokens)) for tokens in ready]
        lengths = [
            len(request.origin_input_ids) + len(request.output_ids) + len(tokens) - 1
            for request, tokens in zip(requests, ready, strict=True)
        ]
        spec_info = NgramVerifyInput(
            draft_token_num=NODES,
            new_seq_lens=torch.tensor(lengths),
            accept_tokens=torch.tensor(rows, dtype=torch.int32).flatten(),
            accept_lens=torch.tensor([len(tokens) for tokens in ready], dtype=torch.int32),
        )
        batch = SimpleNamespace(
            reqs=requests,
            forward_mode=ForwardMode.DECODE,
            seq_lens=torch.tensor(lengths),
            seq_lens_cpu=torch.tensor(lengths),
            spec_info=spec_info,
            has_grammar=False,
            grammar_needs_sync=lambda: False,
            req_pool_indices=None,
            req_to_token_pool=SimpleNamespace(req_to_token=None),
            return_logprob=False,
            texts=[
                [*request.origin_input_ids, *request.output_ids, *tokens]
                for request, tokens in zip(requests, ready, strict=True)
            ],
        )
        result = self.worker.forward_batch_generation(batch)
        counts = result.accept_lens.tolist()
        for request, row, count in zip(
            requests, result.next_token_ids.reshape(-1, NODES).tolist(), counts, strict=True
        ):
            request.pending.append(row[:count])
            self.commit(request)

    def commit(self, request):
        """Process the results of the oldest step, as the host's result processor does."""
        from sglang.srt.managers.schedule_batch import FINISH_MATCHED_TOKEN

        tokens = request.pending.pop(0)
        request.output_ids.extend(tokens)
        request.update_finish_state(len(tokens))
        if request.finished():
            natural = isinstance(request.finished_reason, FINISH_MATCHED_TOKEN)
            self.worker.note_request_finished(rid=request.rid, natural_stop=natural)

    def verify(self, verify_input, batch, *_, **__):
        """Accept the longest path of nodes that the target produces: the host's `eagle_sample`, greedy."""
        size = len(batch.reqs)
        tokens = verify_input.draft_token.reshape(size, NODES).tolist()
        children = verify_input.retrieve_next_token.tolist()
        siblings = verify_input.retrieve_next_sibling.tolist()
        predict = torch.zeros(size * NODES, dtype=torch.int32)
        accept_index = torch.full((size, verify_input.max_tree_depth), -1, dtype=torch.int32)
        accept_lens = torch.zeros(size, dtype=torch.int32)
        for at, text in enumerate(batch.texts):
            assert tokens[at][0] == text[-1]
            depths = depths_of(children[at], siblings[at])
            positions = verify_input.positions[at * NODES : (at + 1) * NODES].tolist()
            assert positions == [len(text) - 1 + depths[node] for node in range(NODES)]
            self.branches += len(set(depths.values())) < NODES
            node, text = 0, list(text)
            while node != -1:
                predict[at * NODES + node] = wanted = target(text)
                accept_index[at, accept_lens[at]] = at * NODES + node
                accept_lens[at] += 1
                text.append(wanted)
                node = children[at][node]
                while node != -1 and tokens[at][node] != wanted:
                    node = siblings[at][node]
        return predict, accept_lens, accept_index


def depths_of(children, siblings):
    """Return the depth of each node that the links reach, by node."""
    depths, open_nodes = {}, [(0, 0)]
    while open_nodes:
        node, depth = open_nodes.pop()
        if node != -1:
            depths[node] = depth
            open_nodes += [(children[node], depth + 1), (siblings[node], depth)]
    return depths


def logits():
    return SimpleNamespace(next_token_logits=None)


def reconstruct(mask, lengths, positions, index, next_token, next_sibling, size, nodes):
    """Fill the tree's links from the mask: the host's kernel of the same name, from its own function on the host."""
    from sglang.srt.speculative.ngram_worker import _derive_tree_links

    tree = mask.reshape(size, nodes, nodes).numpy()
    next_token[:], next_sibling[:] = _derive_tree_links(tree, size, nodes)
    index[:] = torch.arange(size * nodes).reshape(size, nodes)
    positions[:] = (torch.from_numpy(tree).sum(-1) - 1 + lengths[:, None]).flatten()


@pytest.fixture
def make_server(algorithm, monkeypatch):
    def make(is_overlapped, width, rank=0, ranks=1, **settings):
        from sglang.srt.runtime_context import get_parallel

        monkeypatch.setenv("SSD_PLUGIN", json.dumps({"sidecar": "embedded", "capacity": 20000, **settings}))
        worker_class = algorithm.create_worker(SimpleNamespace(disable_overlap_schedule=True))
        with get_parallel().override(tp_group=SimpleNamespace(rank_in_group=rank, world_size=ranks)):
            return Server(monkeypatch, worker_class, is_overlapped, width)

    return make


@pytest.fixture(params=[(False, 1), (True, 1), (True, 4)], ids=["synchronous", "overlapped", "trees"])
def host(request, make_server):
    server = make_server(*request.param)
    yield server
    assert server.session.counters.failures == 0
    server.session.close()


PROMPTS = {"a": [1, 2, 3], "b": [4, 5, 6, 1, 2, 3, 4, 5, 6], "c": [2, 2]}


def test_outputs_are_those_without_drafts(host):
    steps = []
    for _ in range(2):
        steps.append(run_turn(host))
        host.session.namespaces.find("", "").drafter.corpus.refresh()
    assert steps[1] < steps[0] < 30
    assert (host.branches > 0) == (host.worker.topk > 1)
    assert not any(rid in host.session for rid in PROMPTS)


def test_one_rank_drafts_for_all(make_server, monkeypatch):
    sent = []

    def broadcast(nodes, group):
        if group.rank_in_group == 0:
            sent.append(nodes.copy())
        else:
            nodes[:] = sent.pop(0)

    monkeypatch.setattr(worker, "broadcast", broadcast)
    steps = []
    for rank in range(2):
        server = make_server(False, 1, rank, ranks=2)
        assert (server.session is None) == bool(rank)
        steps.append(run_turn(server))
    assert steps[0] == steps[1] < 30
    assert not sent


def run_turn(host):
    """Run the prompts once; return the number of steps."""
    before = host.steps
    for rid, prompt in PROMPTS.items():
        host.add(rid, prompt, 30)
    assert host.run() == [plain(prompt, 30) for prompt in PROMPTS.values()]
    return host.steps - before


def test_drafts_come_from_a_copy_of_the_sidecars_corpus(make_server, socket_address, server_process):
    host = make_server(True, 1, sidecar=socket_address)
    assert type(host.session.namespaces.find("", "").drafter).__name__ == "ReplicaClient"
    first = run_turn(host)
    eventually(lambda: run_turn(host) < 0.7 * first)
    assert host.session.counters.failures == 0
    host.session.close()


@pytest.fixture
def ends(host, monkeypatch):
    """Return what the session is told of requests that end: whole text and how it ended, by id."""
    told = {}
    finish = host.session.finish

    def record(rid, text=None, end=End.FINISHED):
        # The drafter has learned nothing beyond the end.
        assert text is None or host.session._requests[rid].reported <= len(text)
        told[rid] = text, end
        finish(rid, text, end)

    monkeypatch.setattr(host.session, "finish", record)
    return told


def test_the_drafter_learns_what_the_client_got(host, ends):
    for rid, prompt in PROMPTS.items():
        # Drafts that go on after the end are accepted, and discarded by the host.
        host.add(rid, prompt, 60, custom_params={"hints": [*prompt, *plain(prompt, 60, stop=None)]})
    outputs = host.run()
    assert all(output[-1] == STOP for output in outputs)
    expected = zip(PROMPTS.items(), outputs, strict=True)
    assert ends == {rid: ([*prompt, *output], End.FINISHED) for (rid, prompt), output in expected}


def test_a_retracted_request_goes_on(host):
    for rid, prompt in PROMPTS.items():
        host.add(rid, prompt, 30)
    for _ in range(2):
        host.step(list(host.requests.values()))
    request = host.requests["a"]
    if host.is_overlapped:  # The host commits the step in flight before it retracts.
        host.commit(request)
    assert not request.finished()
    request.reset_for_retract()
    host.run(["b"])
    assert "a" in host.session
    request.pending = [[target([*request.origin_input_ids, *request.output_ids])]]
    if not host.is_overlapped:
        host.commit(request)
    assert host.run(["a"]) == [plain(PROMPTS["a"], 30)]


def test_an_aborted_request_is_not_learned(host, ends):
    from sglang.srt.managers.schedule_batch import FINISH_ABORT

    request = host.add("a", PROMPTS["a"], 30)
    host.step([request])
    request.to_finish = FINISH_ABORT()
    host.run()
    assert ends["a"][1] is End.CANCELLED


def test_a_request_that_the_host_drops_is_ended_later(host, ends):
    host.step([host.add("a", PROMPTS["a"], 30)])
    del host.requests["a"]
    host.add("b", PROMPTS["b"], 30)
    host.run()
    assert ends["a"] == (None, End.CANCELLED)


def test_options_of_a_request(host):
    host.step([host.add("a", PROMPTS["a"], 30, custom_params={"ssd_max_draft": 0}, cache_salt="s", session_id="chat")])
    options = host.session._requests["a"].options
    assert (options.max_draft, options.max_tokens, options.salt, options.session) == (0, 30, "1:s", "chat")
    host.run()
    assert host.session.counters.drafted == 0


def test_the_default_settings_are_those_of_the_sidecar(monkeypatch):
    monkeypatch.delenv("SSD_PLUGIN", raising=False)
    session = open_session(SimpleNamespace(model_path="dummy", revision=None), HostLimits(NODES, VOCAB_SIZE))
    assert session.namespaces._settings.sidecar == PluginSettings().sidecar
    session.close()
