"""An engine that calls the conformance checks directly, one sequence at a time; its methods can be made wrong."""

from __future__ import annotations

from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.transport.wire import batch_message, pack
from ssd.types import Progress, StepTime
from tests.drafter_service.raw import drafts_in
from tests.strategies import array

VOCAB_SIZE = 100
PROMPT = [1, 2, 3]
LENGTH = 33
"""Number of output tokens; full steps are cut at the end."""


class MiniEngine:
    """The engine's side of the protocol in its simplest form."""

    def __init__(self, checker):
        self.checker = checker
        self.stream = None
        self.step = 0
        self.last_id = 0

    # Parts that tests replace.

    protocol = 3
    engine = "mini:1"
    most_drafted = LENGTH
    """Maximum length of a draft that is asked for."""
    steps_after_late = 2
    """Number of steps without a draft before the next batch, after a late answer."""

    def time_of(self, tokens):
        """Return what to report of a step with this number of tokens."""
        return StepTime(tokens, 1, 0.01, 0.001)

    def target(self, text):
        return (7 * text[-1] + 3 * len(text)) % 90

    def counts(self, draft, verified, steps):
        """Return the verified tokens and the steps to report."""
        return verified, steps

    def cut(self, draft):
        """Return the part of the draft that is verified."""
        return draft

    def committed(self, output):
        """Return the tokens with which a lost sequence starts again."""
        return output

    def dropped(self, drafts):
        """Return the draft that is verified after a late answer."""
        return []

    def after_error(self, unsent):
        """Return the tokens to send again after an error."""
        return unsent

    def starts_again(self):
        return True

    def finishes(self):
        return True

    # The engine.

    def connect(self):
        self.stream = self.checker.opened()
        model = pb.Model(vocab_size=VOCAB_SIZE)
        self.send(hello=pb.Hello(protocol=self.protocol, client="mini/1", model=model, engine=self.engine))

    def send(self, **fields):
        self.step += 1
        request = pb.DraftRequest(step=self.step, **fields)
        response = self.checker.reply(self.stream, request.SerializeToString())
        if response is None:
            self.checker.closed(self.stream)
        return response

    def start(self, prompt, committed=()):
        self.last_id += 1
        start = pb.Start(
            sequence_id=self.last_id,
            prompt=pack(array(prompt), "u4"),
            committed=pack(array(list(committed)), "u4"),
            request_id=f"request {len(prompt)}",
        )
        self.send(starts=[start])

    def again(self, prompt, output):
        if self.starts_again():
            self.start(prompt, self.committed(output))

    def verify(self, text, draft):
        """Return the tokens of one step."""
        tokens = []
        for token in [*draft, None]:
            tokens.append(self.target([*text, *tokens]))
            if tokens[-1] != token:
                break
        return tokens

    def run(self, prompt=PROMPT, length=LENGTH):
        """Run one request."""
        if self.stream is None:
            self.connect()
        self.start(prompt)
        output, draft, unsent, verified, steps, extra = [], [], [], 0, 0, 0
        times = []
        while len(output) < length:
            tried = self.cut(draft)
            tokens = self.verify([*prompt, *output], tried)[: length - len(output)]
            verified, steps = verified + len(tried), steps + 1
            times.append(self.time_of(1 + len(tried)))
            output, unsent, last, draft = [*output, *tokens], [*unsent, *tokens], draft, []
            if extra or len(output) == length:
                extra = max(0, extra - 1)
                continue
            said = self.counts(last, verified, steps)
            limit = min(self.most_drafted, length - len(output) - 1)
            progress = Progress.of_one(self.last_id, array(unsent), verified=said[0], steps=said[1], max_draft=limit)
            progress.step_times, times = [time for time in times if time is not None], []
            response = self.send(batch=batch_message(progress))
            if response is None:
                self.connect()
                self.again(prompt, output)
                unsent, verified, steps = [], 0, 0
            elif response.HasField("error"):
                unsent = self.after_error(unsent)
                steps = steps if unsent else 0
            else:
                draft, unsent, verified, steps = drafts_in(response.drafts, 1).tokens.tolist(), [], 0, 0
                if self.stream.is_late:
                    draft, extra = self.dropped(draft), self.steps_after_late - 1
                if response.lost_ids:
                    self.again(prompt, output)
        if self.finishes():
            said = self.counts([], verified, steps)
            finish = pb.Finish(
                sequence_id=self.last_id, tokens=pack(array(unsent), "u4"), verified=said[0], steps=said[1]
            )
            self.send(finishes=[finish])

    def run_all(self, times=7):
        """Run the prompt often enough for all scenarios, and end the stream."""
        for _ in range(times):
            self.run()
        self.checker.closed(self.stream)
        self.checker.conclude()
        return self.checker.checks.failures
