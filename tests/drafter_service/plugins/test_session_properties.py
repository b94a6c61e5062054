"""The session against a simulated host: whatever the host does, the drafter's text, counts and limits are right."""

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from drafter_service.plugins.namespaces import MAX_NAMESPACES
from drafter_service.plugins.options import End, RequestOptions
from tests.drafter_service.plugins.host_simulator import LIMITS, SimulatedHost
from tests.strategies import examples

PROMPTS = st.lists(st.integers(0, 6), min_size=1, max_size=20)
OPTIONS = st.builds(
    RequestOptions,
    max_tokens=st.sampled_from([None, 1, 9]),
    has_stop_strings=st.booleans(),
    salt=st.sampled_from(["", "a", "b"]),
    session=st.sampled_from(["", "chat"]),
    private=st.booleans(),
    max_draft=st.sampled_from([None, None, 0, 2]),
    hints=st.sampled_from([(), (1, 2, 3)]),
)


class HostMachine(RuleBasedStateMachine):
    """Requests come, run in any batches, are preempted, retracted and dropped, and end."""

    @initialize()
    def begin(self):
        self.host = SimulatedHost()
        self.names = 0

    def teardown(self):
        self.host.session.close()
        assert self.host.session.counters.failures == 0
        for drafter in self.host.drafters.values():
            assert not drafter.running
        drafters = self.host.drafters.values()
        learned = [(told.hints, told.prompt, told.output) for drafter in drafters for told in drafter.learned]
        # Requests whose session ended early, because there were too many, are not learned.
        finished = [([*one.options.hints], one.prompt, one.output) for one in self.host.finished]
        assert all(learned.count(each) <= finished.count(each) for each in learned)

    def some(self, data, **arguments):
        return data.draw(st.lists(st.sampled_from(sorted(self.host.requests)), **arguments))

    @rule(prompt=PROMPTS, options=OPTIONS, is_reused=st.booleans(), data=st.data())
    def add(self, prompt, options, is_reused, data):
        if is_reused and self.host.requests:
            name = data.draw(st.sampled_from(sorted(self.host.requests)))
        else:
            self.names += 1
            name = f"request {self.names}"
        self.host.add(name, prompt, options, seed=len(prompt) % 3)

    @precondition(lambda self: self.host.requests)
    @rule(scheduling=st.sampled_from(["all", "all", "all", "cut", "none", "padded"]), data=st.data())
    def step(self, scheduling, data):
        """Run some requests; the others are preempted."""
        names = self.some(data, min_size=1)
        before = {name: len(self.host.requests[name].output) for name in names}
        self.host.step(names, scheduling)
        assert all(
            len(self.host.requests[name].output) > size or self.host.requests[name].is_full
            for name, size in before.items()
        )
        self.check_told(names)

    @precondition(lambda self: self.host.requests)
    @rule(data=st.data())
    def step_without_drafting(self, data):
        self.host.step([name for name in self.some(data) if self.host.requests[name].is_counted], drafted=[])

    @precondition(lambda self: self.host.requests)
    @rule(placeholders=st.sampled_from([0, 0, 2]), data=st.data())
    def ask_again(self, placeholders, data):
        names = self.some(data)
        self.host.draft(names, placeholders)
        self.check_told(names)

    @precondition(lambda self: self.host.requests)
    @rule(data=st.data())
    def begin_and_discard(self, data):
        """Begin a step with the drafts, and preempt the requests before it runs."""
        names = self.some(data)
        for name in names:
            self.host.session.schedule({name: self.host.requests[name].draft})
        self.host.draft(names)

    @precondition(lambda self: self.host.requests)
    @rule(tokens=st.integers(1, 10), data=st.data())
    def retract(self, tokens, data):
        name = data.draw(st.sampled_from(sorted(self.host.requests)))
        self.host.retract(name, tokens)
        self.host.draft([name])

    @precondition(lambda self: self.host.requests)
    @rule(end=st.sampled_from(End), with_text=st.booleans(), data=st.data())
    def end(self, end, with_text, data):
        name = data.draw(st.sampled_from(sorted(self.host.requests)))
        request, told = self.host.requests[name], self.host.told(name)
        self.host.end(name, end, with_text)
        self.host.session.finish(name, request.text, end)  # A second end does nothing.
        if told is not None and with_text:
            assert told.output == request.output
            if request.is_counted:
                assert (told.verified, told.steps) == (request.verified, request.steps)

    @precondition(lambda self: self.host.requests)
    @rule(data=st.data())
    def vanish(self, data):
        self.host.vanish(data.draw(st.sampled_from(sorted(self.host.requests))))

    @invariant()
    def is_bounded(self):
        session = self.host.session
        assert session.running <= LIMITS.max_requests
        assert len(session.namespaces.opened) <= MAX_NAMESPACES + 1
        tracked = [each for each in session._requests.values() if each.namespace is not None]
        for drafter in self.host.drafters.values():
            own = [each.sequence_id for each in tracked if each.namespace.drafter is drafter]
            assert sorted(drafter.running) == sorted(own)

    def check_told(self, names):
        """The drafter knows the whole text of each request that it drafted for, and what became of its drafts."""
        for name in names:
            request, told = self.host.requests[name], self.host.told(name)
            if told is None:
                continue
            assert (told.hints, told.prompt) == ([*request.options.hints], request.prompt)
            assert told.output == request.output
            assert told.arguments["learn"] is not request.options.private
            if request.is_counted:
                assert (told.verified, told.steps) == (request.verified, request.steps)


TestHost = HostMachine.TestCase
TestHost.settings = settings(examples(30), stateful_step_count=30)
