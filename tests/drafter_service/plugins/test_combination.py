"""Drafts of a host's own network, of the corpus, and of both: what the host gets, and what the drafter is told."""

import random
import sys

import pytest

from drafter_service.plugins.options import HostLimits, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.settings import PluginSettings
from tests.drafter_service.plugins.host_simulator import RecordingDrafter

PROMPT = [1, 2, 3]
KNOWN = [4, 5, 6, 7, 8, 9, 10, 11]
"""Text that the corpus has."""
MAX_DRAFT = 8
VOCAB_SIZE = 400


class Drafter(RecordingDrafter):
    """Records its calls, and can draft after other tokens unless it is remote."""

    def __init__(self, *, is_remote=False):
        super().__init__()
        self.is_remote = is_remote

    def draft_after(self, progress):
        drafts = self.inner.draft_after(progress)
        return type(drafts).empty(len(drafts)) if self.is_remote else drafts


class Host:
    """A host that decodes a given output for one request, with a network whose drafts are given."""

    def __init__(self, *, is_remote=False, shadow=False):
        self.reports, self.drafter = [], Drafter(is_remote=is_remote)
        limits = HostLimits(max_draft=MAX_DRAFT, vocab_size=VOCAB_SIZE, has_network=True)
        settings = PluginSettings(sidecar="embedded", shadow=shadow)
        self.session = HostSession(settings, limits, self.reports.append, lambda *_: self.drafter)
        self.requests = 0

    def run(self, output, network, options=None):
        """Run a request; network: returns the network's draft for the length of the output so far.

        Return the drafts, and the number of steps after the first token.
        """
        self.requests += 1
        name, text, drafts, end = self.requests, [*PROMPT, output[0]], [], len(PROMPT) + len(output)
        self.session.start(name, PROMPT, options or RequestOptions(max_tokens=len(output)))
        while len(text) < end:
            draft = self.session.draft([(name, text)], 0, 0, [network(len(text) - len(PROMPT))])[0]
            drafts.append(draft)
            self.session.schedule({name: draft})
            text += self.verified(draft, output[len(text) - len(PROMPT) :])
        self.session.finish(name, text)
        return drafts

    @staticmethod
    def verified(draft, rest):
        length = 0
        while length < min(len(draft), len(rest)) and draft[length] == rest[length]:
            length += 1
        return rest[: length + 1]


@pytest.fixture
def host():
    host = Host()
    yield host
    host.session.close()
    assert not host.reports
    assert host.session.counters.failures == 0


def nothing(_):
    return []


def noise(seed, tokens, low=20, high=50):
    return random.Random(seed).choices(range(low, high), k=tokens)


@pytest.mark.parametrize("is_remote", [False, True])
def test_the_corpus_continues_the_networks_draft(is_remote):
    """After tokens that the corpus does not know, the network's draft leads to text that it does. A remote drafter
    cannot draft after it, so that the better of the two drafts is chosen.
    """
    host, drafts = Host(is_remote=is_remote), []
    for seed in range(120):
        known = [*range(100 + seed % 20 * 10, 108 + seed % 20 * 10)]
        output = [*noise(seed, 4, 300, 400), *known]
        drafts.append(host.run(output, lambda at, output=output: output[at : at + 2] if at < 6 else [40, 41]))
    first, second, *rest = drafts[-1]
    assert first[:2] == output[1:3]
    assert second == (known[:2] if is_remote else known[:7])
    assert rest == ([known[3:7]] if is_remote else [])  # The network's draft has always been wrong here.
    host.session.close()
    assert not host.reports


@pytest.mark.parametrize("is_right", [True, False])
def test_the_acceptance_of_the_network_is_learned(host, is_right):
    """It is verified as far as it is right, and not where it has always been wrong."""
    lengths = []
    for seed in range(40):
        output = noise(seed, 12, low=0)
        drafts = host.run(output, lambda at, output=output: output[at : at + 4] if is_right else [1, 1, 1, 1])
        lengths.append(sum(map(len, drafts)) / len(drafts))
    assert lengths[-1] > 3 if is_right else lengths[-1] < 0.5 * lengths[0]


def test_drafts_of_the_network_that_no_host_can_verify(host):
    """Too long, with ids outside of the vocabulary, and with negative ones."""
    output = noise(1, 40)
    kinds = [
        lambda at: output[at : at + 30],
        lambda at: [output[at], VOCAB_SIZE, 1],
        lambda at: [output[at], -1],
        nothing,
    ]
    drafts = [draft for kind in kinds for draft in host.run(output, kind)]
    assert max(map(len, drafts)) == MAX_DRAFT
    assert all(0 <= token < VOCAB_SIZE and type(token) is int for draft in drafts for token in draft)


@pytest.mark.parametrize("networks", [[None], [["a"]], [[1], [2]]])
def test_an_invalid_draft_costs_a_step_without_one(networks):
    host = Host()
    host.session.start("a", PROMPT)
    assert [len(draft) for draft in host.session.draft([("a", PROMPT)], 0, 0, networks)] in ([0], [6])
    assert host.session.counters.failures <= 1
    assert host.run(KNOWN, lambda at: KNOWN[at : at + 2])
    host.session.close()


def test_a_host_in_which_kernels_cannot_be_loaded_has_the_networks_drafts(monkeypatch):
    monkeypatch.setitem(sys.modules, "drafter_service.plugins.combination", None)
    host = Host()
    output = [*range(300, 310)]
    drafts = host.run(output, lambda at: output[at : at + 2])
    assert drafts == [output[at : at + 2] for at in (1, 4, 7)]
    assert host.session.counters.failures == 1
    assert ["ImportError" in report or "ModuleNotFoundError" in report for report in host.reports] == [True]
    host.session.close()


def test_requests_without_the_drafter_have_the_networks_drafts(host):
    assert host.session.draft([("unknown", [1, 2])], 0, 0, [[7, 8, VOCAB_SIZE]]) == [[7, 8]]
    drafts = host.run([7] * 12, lambda at: [7, 7], RequestOptions(max_draft=0))
    assert drafts == [[]] * 11  # Its client wants none.
    host.drafter.draft = lambda _: 1 // 0
    assert host.run(KNOWN, lambda at: KNOWN[at : at + 2])[0] == KNOWN[1:3]
    assert host.session.counters.failures == 1
    host.session.counters.failures = 0
    host.reports.clear()


def test_the_drafter_is_told_what_became_of_its_own_draft():
    """Counts of tokens, steps, and of the results of its own draft, whatever was verified instead."""
    host = Host()
    for seed in range(8):
        output = [*noise(seed, 3), *KNOWN, *noise(seed + 100, 3)]
        drafts = host.run(output, lambda at, output=output: [*output[at : at + 2], 0])
        told = host.drafter.learned[-1]
        assert (told.output, told.steps) == (output, 1 + len(drafts))
        assert told.verified > 0 or not seed
    counters = host.session.counters
    assert counters.accepted == 8 * 14 - counters.steps
    assert counters.accepted <= counters.verified <= counters.drafted
    host.session.close()
    assert not host.reports


def test_steps_during_a_pause_are_counted(host):
    """The network's tokens are accepted in steps in which the drafter is not called."""
    draft, output = host.drafter.draft, noise(5, 40)

    def draft_and_pause(progress):
        drafts = draft(progress)
        drafts.pause_steps = 4
        return drafts

    host.drafter.draft = draft_and_pause
    drafts = host.run(output, lambda at: output[at : at + 2])
    assert len(drafts) < 16
    assert host.drafter.calls <= 1 + len(drafts) // 5
    told = host.drafter.learned[0]
    assert (told.output, told.steps) == (output, 1 + len(drafts))


def test_in_shadow_mode_the_networks_drafts_are_verified_as_they_are():
    host = Host(shadow=True)
    for seed in range(5):
        output = [*noise(seed, 3), *KNOWN]
        drafts = host.run(output, lambda at, output=output: [0, *output[at : at + 2]])
        assert all(draft[0] == 0 and len(draft) <= 3 for draft in drafts if draft)
        assert len(drafts) == 10
    host.session.close()
    assert not host.reports
