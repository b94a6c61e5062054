"""The session: limits, options, ends, failures; over the embedded drafter and over a running sidecar."""

import json
import tempfile
import threading
from pathlib import Path

import pytest

from drafter_service.client import DrafterClient
from drafter_service.client.tokenizer import TextTokenizer
from drafter_service.observability.facts import ModelIdentity
from drafter_service.plugins.hints import MAX_WAITING
from drafter_service.plugins.namespaces import MAX_NAMESPACES, namespace_name
from drafter_service.plugins.options import MAX_HINT_CHARS, MAX_HINT_TOKENS, End, HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import SHAPES
from ssd.config import DrafterConfig
from ssd.corpus.rollout import Rollout
from ssd.errors import MAX_FAILURES
from tests.drafter_service.fake_server import FakeService, fake_server_thread
from tests.drafter_service.plugins.host_simulator import LIMITS, RecordingDrafter, SimulatedHost
from tests.drafter_service.raw import connected, eventually
from tests.servers import serving

LOOP = [1, 2, 3, 4, 5, 1, 2, 3]


def first_draft(session, prompt=LOOP, options=None, extras=None, name="a"):
    """Start a request, and return its first draft."""
    session.start(name, prompt, options, extras)
    return session.draft([(name, prompt)])[0]


@pytest.fixture
def reports():
    return []


@pytest.fixture
def make_session(reports):
    """Return a function that makes sessions, over an embedded drafter by default; all are closed at the end."""
    sessions = []

    def make(limits=None, **settings):
        limits = HostLimits(**{"max_draft": 8, "vocab_size": 50, **(limits or {})})
        settings = PluginSettings(**{"sidecar": "embedded", "capacity": 20_000, **settings})
        sessions.append(HostSession(settings, limits, reports.append))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def session(make_session, reports):
    yield make_session()
    assert not reports


@pytest.fixture(scope="module")
def sidecar():
    """Yield the address of a running sidecar, in which each test has a namespace of its own."""
    with (
        tempfile.TemporaryDirectory(prefix="ssd-") as folder,
        serving(listen=f"unix:{folder}/drafter.sock", drafting=DrafterConfig(capacity=100_000)) as address,
    ):
        yield address


@pytest.fixture
def host():
    host = SimulatedHost()
    yield host
    host.session.close()


@pytest.mark.parametrize(
    ("limits", "options", "longest"),
    [
        ({"max_draft": 3}, {}, 3),
        ({"context_window": len(LOOP) + 3}, {}, 2),
        ({"context_window": len(LOOP)}, {}, 0),
        ({}, {"max_tokens": 4}, 3),
        ({}, {"max_tokens": 0}, 0),
        ({}, {"max_draft": 1}, 1),
        ({}, {"max_draft": -1}, 0),
    ],
)
def test_drafts_fit_the_limits(make_session, limits, options, longest):
    assert len(first_draft(make_session(limits), options=RequestOptions(**options))) == longest


def test_a_step_that_did_not_end_verified_nothing(host):
    host.add("a", LOOP, RequestOptions())
    host.draft(["a"])
    host.session.schedule({"a": host.requests["a"].draft})
    host.session.finish("a", LOOP)
    [told] = host.drafters["", ""].learned
    assert (told.offered > 0, told.verified, told.steps) == (True, 0, 0)


def test_an_output_that_ends_before_its_last_draft_is_learned_as_it_was_reported(host):
    host.add("a", LOOP, RequestOptions())
    host.session.draft([("a", [*LOOP, 4, 5, 6])])
    host.session.finish("a", [*LOOP, 4])
    assert [(told.prompt, told.output) for told in host.drafters["", ""].learned] == [(LOOP, [4, 5, 6])]


def test_of_too_many_requests_the_least_recently_drafted_one_is_dropped(make_session):
    session = make_session({"max_requests": 2})
    for name in "ab":
        session.start(name, LOOP)
    session.draft([("a", LOOP)])
    session.start("c", LOOP)
    assert [name in session for name in "abc"] == [True, False, True]


@pytest.mark.parametrize(
    ("end", "options", "is_learned"),
    [
        (End.FINISHED, {}, True),
        (End.CANCELLED, {"has_stop_strings": True}, False),
        (End.ABORTED, {}, False),
        (End.ABORTED, {"has_stop_strings": True}, True),
        (End.FINISHED, {"private": True}, False),
    ],
)
def test_the_end_of_a_request_and_its_options_decide_whether_it_is_learned(host, end, options, is_learned):
    host.add("a", LOOP, RequestOptions(**options))
    host.step(["a"])
    host.end("a", end)
    assert len(host.drafters["", ""].learned) == is_learned


def test_salts_and_adapters_share_no_text(session):
    session.start("a", [9], RequestOptions(salt="s"))
    session.finish("a", [9, 30, 31, 32, 33, 34])
    eventually(lambda: first_draft(session, [30, 31], RequestOptions(salt="s"))[:2] == [32, 33])
    for options in (RequestOptions(), RequestOptions(salt="t"), RequestOptions(salt="s", adapter="x")):
        assert first_draft(session, [30, 31], options) == []


def test_namespaces_are_named_by_a_hash_of_salt_and_adapter():
    default, named = PluginSettings(), PluginSettings(namespace="team")
    assert namespace_name(default, "", "") == ""
    assert namespace_name(default, "lora", "") == ""
    assert namespace_name(named, "", "") == "team"
    names = {
        namespace_name(settings, adapter, salt)
        for settings in (default, named)
        for adapter, salt in (("lora", "s"), ("", "s"), ("", "loras"))
    } | {namespace_name(named, "lora", "")}
    assert len(names) == 7
    assert all("@" in name and "lora" not in name for name in names)


def test_namespaces_are_few_and_the_one_that_was_not_used_for_longest_makes_room(host):
    names = [str(number) for number in range(MAX_NAMESPACES)]
    for name in [*names, "more", "other"]:
        host.add(name, LOOP, RequestOptions(salt=name))
        assert (host.told(name) is not None) == (name in names)
    (report,) = host.reports
    assert "too many cache salts" in report
    for name in names:
        host.end(name)
    for name in (names[0], "next"):
        host.add(name, LOOP, RequestOptions(salt=name))
        assert host.told(name) is not None
    assert [salt for _, salt in host.session.namespaces.opened] == [*names[2:], names[0], "next"]
    assert "of unused ones is forgotten" in host.reports[1]


def test_requests_without_salt_keep_their_namespace(host):
    for salt in ("", *map(str, range(MAX_NAMESPACES + 1)), ""):
        host.add(salt, LOOP, RequestOptions(salt=salt))
        host.step([salt])
        host.end(salt)
    assert len(host.session.namespaces.opened) == MAX_NAMESPACES + 1
    assert len(host.drafters["", ""].learned) == 2
    assert [line for line in host.reports if "too many" in line] == []


def test_sessions_of_two_users_differ():
    ids = {
        RequestOptions(user=user, session=session).session_id
        for user, session in (("a", "bc"), ("ab", "c"), ("", "abc"), ("a", "b"))
    }
    assert len(ids) == 4
    assert RequestOptions(user="a").session_id is None


def test_extras_of_a_request():
    extras = {"ssd_private": True, "ssd_session": "chat", "ssd_max_draft": 2, "hints": [1], "temperature": 3, "x": None}
    for hints, expected in (("a", ("a",)), (["a", "", "b"], ("a", "b"))):
        assert RequestOptions().with_extras({"hints": hints}).hint_texts == expected
    assert RequestOptions(hints=(1,)).with_extras({"hints": []}).hints == (1,)
    assert RequestOptions().with_extras(extras) == RequestOptions(private=True, session="chat", max_draft=2, hints=(1,))
    rollout = {"ssd_group": "problem", "ssd_version": 3}
    assert RequestOptions().with_extras(rollout).rollout == Rollout("problem", 3)
    assert RequestOptions().with_extras({"ssd_version": 3}).rollout is None


def test_rollouts_without_a_group_have_one_of_their_prompt():
    host = SimulatedHost(settings=PluginSettings(sidecar="embedded", rollouts=True))
    given = [(LOOP, None), (LOOP, {"ssd_version": 3}), ([*LOOP, 9], {}), (LOOP, {"ssd_group": "problem"})]
    for number, (prompt, extras) in enumerate(given):
        host.session.start(number, prompt, extras=extras)
    told = host.drafters["", ""].running.values()
    first, again, other, named = [each.arguments["rollout"] for each in told]
    assert again == Rollout(first.group, 3)
    assert first.version == other.version == 0
    assert first.group != other.group
    assert named == Rollout("problem")
    host.session.close()


@pytest.mark.parametrize(
    "extras",
    [
        {"ssd_private": "no"},
        {"ssd_session": 3},
        {"ssd_session": "\ud800"},
        {"ssd_max_draft": True},
        {"hints": 5},
        {"hints": [1.0]},
        {"hints": ["text", 1]},
        {"hints": [1, True]},
        {"ssd_group": 10_240 * "a"},
        {"ssd_group": "\ud800"},
        {"ssd_version": -1, "ssd_group": "a"},
        {"ssd_version": "3", "ssd_group": "a"},
    ],
)
def test_a_request_with_unreadable_extras_has_no_drafts(make_session, reports, extras):
    session = make_session()
    assert first_draft(session, extras=extras) == []
    session.finish("a", [*LOOP, 4])
    assert first_draft(session, extras=extras, name="b") == []
    assert len(reports) == 1
    assert next(iter(extras)) in reports[0]


def test_the_drafter_gets_no_tokens_outside_the_vocabulary_of_the_models_files(make_session, reports):
    session = make_session(model=ModelIdentity(vocab_size=6))
    assert first_draft(session)
    assert first_draft(session, [1, 6, 1], name="b") == first_draft(session, [1, -1, 1], name="c") == []
    assert len(reports) == 1


def test_a_reused_id_with_another_prompt_has_no_drafts(make_session, reports):
    session = make_session()
    first_draft(session)
    assert session.draft([("a", [6, *LOOP, 1, 2])]) == [[]]
    assert "prompt changed" in reports[0]


def test_a_failing_drafter_costs_drafts_of_its_requests_alone():
    class FailingDrafter(RecordingDrafter):
        def draft(self, progress):
            if self.calls == 1:
                self.calls += 1
                raise RuntimeError("tokens 1 2 3")
            return super().draft(progress)

    host = SimulatedHost(FailingDrafter)
    for name in "ab":
        host.add(name, LOOP, RequestOptions())
    host.draft(["a"])
    assert host.requests["a"].draft
    host.step(["a"])
    host.step(["a", "b"])
    assert host.requests["a"].draft == []
    assert host.requests["b"].draft
    host.add("c", LOOP, RequestOptions())
    host.draft(["c"])
    assert host.requests["c"].draft
    assert host.session.counters.failures == 1
    assert len(host.reports) == 1
    assert "RuntimeError at test_session.py:" in host.reports[0]
    assert "tokens 1" not in host.reports[0]
    host.session.close()


def test_a_drafter_that_fails_again_and_again_is_switched_off():
    class FailingDrafter(RecordingDrafter):
        def draft(self, progress):
            raise RuntimeError("broken")

    host = SimulatedHost(FailingDrafter)
    for number in range(MAX_FAILURES + 10):
        host.add(number, LOOP, RequestOptions())
        host.draft([number])
    assert host.session.counters.failures == MAX_FAILURES
    assert [("switched off" in report) for report in host.reports] == [False, True]
    host.session.close()


@pytest.mark.parametrize("address", ["nowhere", "unix:/nonexistent/drafter.sock"])
def test_a_missing_sidecar_costs_drafts_and_is_reported_once(make_session, reports, address):
    session = make_session(sidecar=address, drafting="sidecar")
    text = list(LOOP)
    for name in "ab":
        session.start(name, text)
        for _ in range(3):
            assert session.draft([(name, text)]) == [[]]
            text.append(1)
        session.finish(name, text)
    eventually(lambda: len(reports) == 1)
    assert address in reports[0]


def test_limits_of_a_sidecar_are_reported_once(make_session, reports, socket_address):
    service = FakeService(lambda _text, limit: [1] * limit, max_draft=4, may_learn=False)
    with fake_server_thread(socket_address, service):
        session = make_session({"max_draft": 6}, sidecar=socket_address, drafting="sidecar", deadline_s=10)
        for number in range(2):
            options = RequestOptions(salt=str(number))
            eventually(lambda: first_draft(session, options=options))  # noqa: B023
        session.close()
    assert len(reports) == 2
    assert "at most 4 tokens, not 6" in reports[0]
    assert "--max-draft 6" in reports[0]
    assert "lacks the right to learn in namespace" in reports[1]


@pytest.mark.parametrize("model", [ModelIdentity("m", "other", "", 50), ModelIdentity("m", "", "", 51)])
def test_a_sidecar_that_refuses_a_model_is_reported_once(make_session, reports, sidecar, model):
    with DrafterClient(sidecar, model=ModelIdentity("m", "abc", "", 50), namespace="n"):
        session = make_session(sidecar=sidecar, drafting="sidecar", namespace="n", model=model)
        for number in range(3):
            assert first_draft(session, name=str(number)) == []
        eventually(lambda: reports)
    assert len(reports) == 1
    assert "no connection to the drafter at unix:" in reports[0]
    assert ("another tokenizer" if model.tokenizer else "50 tokens, not 51") in reports[0]


def test_calls_of_a_confused_host_do_not_raise(make_session, reports):
    session = make_session()
    session.finish("unknown", [1])
    session.schedule({"unknown": [1]})
    assert session.draft([("unknown", [1]), ("unknown", [])]) == [[], []]
    assert session.draft([]) == []
    assert not reports
    session.start("a", None)
    assert len(reports) == 1


@pytest.mark.parametrize("drafting", ["sidecar", "replica"])
def test_a_sidecar_drafts_as_the_embedded_drafter(sidecar, drafting):
    """Two passes of the same requests, in batches: the second has the text of the first."""
    settings = PluginSettings(sidecar=sidecar, namespace=f"of-{drafting}", deadline_s=10, drafting=drafting)
    remote, local = SimulatedHost(None, settings), SimulatedHost()
    prompts = {str(seed): [10 + seed, 20 + seed, 30 + seed] for seed in range(4)}
    for host in (remote, local):
        for number in range(2):
            for name, prompt in prompts.items():
                host.add(name, prompt, RequestOptions(max_tokens=24, salt="s"), seed=int(name))
            while not all(request.is_full for request in host.requests.values()):
                host.step(list(prompts))
            for name in prompts:
                host.end(name)
            accepted = host.session.counters.accepted
            if number == 0:
                first = accepted
                eventually(lambda host=host: repeats(host, prompts))
        assert accepted > 1.2 * first
        assert accepted + host.session.counters.steps == 2 * 4 * 24
        assert host.session.counters.failures == 0
        host.session.close()
    assert not remote.reports


def test_a_sidecar_scores_the_drafts_that_a_host_withholds(sidecar):
    settings = PluginSettings(sidecar=sidecar, deadline_s=10, namespace="withheld", shadow=True)
    host = SimulatedHost(None, settings)
    eventually(lambda: host.session.namespaces.find("", "").drafter.welcome)
    for name in "ab":
        host.add(name, LOOP, RequestOptions(max_tokens=24))
        while not host.requests[name].is_full:
            host.step([name])
            assert host.requests[name].draft == []
        host.end(name)
    host.session.close()
    with connected(sidecar) as caller:

        def read():
            return json.loads(caller.call("Report", namespace="withheld").json)["namespaces"][0]

        eventually(lambda: (read()["shadow"] or {"drafting": {"committed": 0}})["drafting"]["committed"] == 48)
        report = read()
    assert report["shadow"]["drafting"]["accepted"] > 0
    assert report["drafting"]["steps"] == 0
    assert not host.reports


def test_an_embedded_drafter_has_no_shadow_mode(make_session, reports):
    assert first_draft(make_session(shadow=True)) == []
    (report,) = reports
    assert report.startswith('"shadow" needs a sidecar; ')


@pytest.mark.parametrize("trees", [False, True])
def test_a_sidecar_drafts_what_the_host_verifies(make_session, reports, socket_address, trees):
    service = FakeService()
    with fake_server_thread(socket_address, service):
        make_session({"trees": trees}, sidecar=socket_address, drafting="sidecar").open()
        eventually(lambda: service.requests)
        assert not reports
    assert SHAPES[service.requests[0].hello.draft_shape] == ("tree" if trees else "path")


def test_the_namespace_is_told_once_with_text_that_is_elsewhere(socket_address):
    service, told, reports = FakeService(held=pb.Held(other="b", other_tokens=7)), [], []
    with fake_server_thread(socket_address, service):
        session = HostSession(
            PluginSettings(sidecar=socket_address, drafting="sidecar"), LIMITS, reports.append, inform=told.append
        )
        session.open()
        first_draft(session, options=RequestOptions(salt="s"))
        eventually(lambda: reports and len(service.requests) > 1)
        session.close()
    assert told == [f"up to {LIMITS.max_draft} draft tokens per step from the namespace default (0 tokens)"]
    (line,) = reports
    assert line.startswith("namespace default is empty, but namespace b holds 7 tokens of the same tokenizer")
    assert line.endswith('set "namespace" to "b"')


def test_a_sidecar_that_dies_costs_drafts_until_it_returns(make_session, reports, socket_address):
    session = make_session(sidecar=socket_address, drafting="sidecar", deadline_s=5)
    with fake_server_thread(socket_address, FakeService(lambda _text, limit: [1] * limit)) as server:
        eventually(lambda: first_draft(session))
        server.stop()
        eventually(lambda: session.draft([("a", [*LOOP, 4])]) == [[]])
        server.start()
        eventually(lambda: session.draft([("a", [*LOOP, 4])])[0])
        session.close()
    assert len(reports) <= 2
    assert all("no connection to the drafter" in report for report in reports)
    assert session.counters.failures == 0


def repeats(host, prompts):
    """Return whether the outputs of the first pass are drafted for the same prompts."""
    for name, prompt in prompts.items():
        host.session.start(name, prompt, RequestOptions(salt="s", private=True))
    drafts = host.session.draft(list(prompts.items()))
    for name in prompts:
        host.session.finish(name, end=End.CANCELLED)
    return all(drafts)


MODEL = Path(__file__).parents[3] / "engine" / "models" / "assets" / "stdlib-7m"


@pytest.fixture(scope="module")
def texts():
    """Return the tokenizer that turns special tokens in texts into text."""
    return TextTokenizer(MODEL, special_as_text=True)


@pytest.fixture
def hinted(make_session):
    """Return a session for the shipped model."""
    return make_session({"vocab_size": 4096}, folder=MODEL)


@pytest.fixture
def may_load(monkeypatch):
    """Return an event before which no tokenizer is loaded."""
    event, load = threading.Event(), TextTokenizer.__init__
    monkeypatch.setattr(TextTokenizer, "__init__", lambda *args, **more: event.wait(60) and load(*args, **more))
    return event


def waited(session, name="a"):
    """Wait until the hints of a request are tokenized."""
    session._requests[name].hints.result()


@pytest.mark.parametrize("hint", ["def quicksort(items, key=None):", "日本語のテキストです。", "<|endoftext|> is text"])
@pytest.mark.parametrize("as_list", [False, True])
def test_texts_are_hints_once_they_are_tokenized(hinted, reports, texts, hint, as_list):
    (tokens,) = texts.encode([hint])
    ids = tokens.tolist()
    assert texts.decode(tokens) == hint
    assert 0 not in ids
    prompt = [9, *ids[:3]]
    hinted.start("a", prompt, extras={"hints": ["another text", hint] if as_list else hint})
    waited(hinted)
    assert hinted.draft([("a", prompt)])[0][:2] == ids[3:5]
    # After a text that is not what was reported, the request begins again, with its hints.
    hinted.draft([("a", [*prompt, 5, 6])])
    assert hinted.draft([("a", [*prompt, *ids[3:4]])])[0][:1] == ids[4:5]
    assert (hinted.counters.failures, reports) == (0, [])


def test_no_step_waits_for_hints(hinted, reports, may_load):
    """The request is learned, too, if it ends before they are tokenized."""
    hint = "def quicksort(items, key=None):"
    for name, prompt in (("a", [1, 2, 3]), ("b", [7, 8])):
        hinted.start(name, prompt, extras={"hints": hint})
    assert hinted.draft([("a", [1, 2, 3, 4]), ("b", [7, 8, 9])]) == [[], []]
    hinted.finish("a", [1, 2, 3, 4, 5, 6])
    assert hinted.draft([("b", [7, 8, 9, 10])]) == [[]]
    may_load.set()
    waited(hinted, "b")
    hinted_ids = hinted._requests["b"].hints.result()
    # As far into the hint as the output is.
    assert hinted.draft([("b", [7, 8, 9, 10])])[0][:2] == [*hinted_ids[2:4]]
    eventually(lambda: first_draft(hinted, [1, 2, 3, 4], name="c")[:2] == [5, 6])
    assert (hinted.counters.steps, hinted.counters.failures, reports) == (5, 0, [])


def test_hints_of_ended_requests_are_not_tokenized_and_few_wait(hinted, reports, may_load, monkeypatch):
    encoded, encode = [], TextTokenizer.encode
    monkeypatch.setattr(TextTokenizer, "encode", lambda self, texts: encoded.extend(texts) or encode(self, texts))

    def start(number):
        hinted.start(number, [1, 2, 3], extras={"hints": f"text {number}"})
        return hinted._requests[number].hints

    hints = [start(number) for number in range(MAX_WAITING + 1)]
    assert None not in hints[:-1]
    assert hints[-1] is None
    assert len(reports) == 1
    assert reports[0].startswith("hints that are texts are ignored while those of 64 requests wait")
    # A request without its hints has drafts, as one without any.
    assert hinted._requests[MAX_WAITING].namespace is not None
    for number in range(1, MAX_WAITING):
        hinted.finish(number, [1, 2, 3, 4] if number % 2 else None)
    start("a")
    start("a")  # The first one ends.
    may_load.set()
    waited(hinted)
    assert encoded == ["text 0", "text a"]
    assert (hinted.counters.failures, len(reports)) == (0, 1)


@pytest.mark.parametrize("hints", ["日" * 4_000_000, ["a"] * 200_000, [7] * 40_000], ids=["text", "texts", "ids"])
def test_long_hints_are_cut(hinted, reports, hints):
    hinted.start("a", [1, 2, 3], extras={"hints": hints})
    request = hinted._requests["a"]
    if request.hints is not None:
        assert sum(map(len, request.options.hint_texts)) <= MAX_HINT_CHARS
        waited(hinted)
        hinted.draft([("a", [1, 2, 3])])
    assert 0 < len(request.options.hints) <= MAX_HINT_TOKENS
    assert reports == ["hints beyond 32,768 tokens, or 64 texts of 131,072 characters in all, are ignored"]


def test_hints_that_cannot_be_tokenized_cost_no_drafts(make_session, reports, tmp_path):
    for folder, reason in ((tmp_path, "has no tokenizer.json"), (None, "the model's folder is not known")):
        session = make_session(folder=folder)
        for name in "ab":
            session.start(name, LOOP, extras={"hints": "text"})
            waited(session, name)
            assert session.draft([(name, LOOP)])[0][:1] == [4]
        line = reports.pop()
        assert line.startswith("hints that are texts are ignored: ")
        assert reason in line
