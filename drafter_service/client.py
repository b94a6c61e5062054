"""The client that engines draft through: the same face as the embedded drafter, and never in the engine's way.

A step waits for its drafts until a deadline; without an answer there is no draft for that step. Until that
answer has come no step is sent or waited for: what is committed meanwhile is held back and told with the next
one, so a slow service is not made slower, one that hangs costs one deadline, and one that is late again and again is
asked ever more rarely. Once the service is gone every
draft is empty, and the caller is told so once.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_service.address import Address
from drafter_service.stubs import drafter_pb2 as pb
from drafter_service.stubs import drafter_pb2_grpc
from drafter_service.wire import MAX_MESSAGE_BYTES, WireError, batch_message, pack, read_drafts
from ssd.draft import DraftBatch, Progress, check_outcome, offsets_of
from ssd.errors import UserError
from ssd.ring import check_tokens

DEADLINE_S = 0.05
"""Longest wait for the drafts of one step."""

PATIENCE_S = 30.0
"""A service that is silent for this long is gone, though its connection may stand."""

MAX_REST_DOUBLINGS = 6
"""A service that is always late costs one deadline in 64 steps."""

CONNECT_TIMEOUT_S = 3.0
CLOSE_TIMEOUT_S = 2.0


class DrafterClient:
    """A drafter behind a gRPC stream. One thread uses it."""

    def __init__(
        self,
        address: str,
        *,
        deadline_s: float = DEADLINE_S,
        patience_s: float = PATIENCE_S,
        on_lost: Callable[[str], None] = lambda _: None,
    ) -> None:
        """Connect to a service at `address`. Raises UserError if none answers there.

        `on_lost` is called once, from any thread and with the reason, if the service goes away or leaves steps
        unanswered for `patience_s` seconds.
        """
        self.address = Address.parse(address).text
        self.lost: str | None = None
        """Why the service is gone, once it is."""
        self.timeouts = 0
        """Steps that went without drafts because the answer came too late."""
        self._deadline_s = deadline_s
        self._patience_s = patience_s
        self._on_lost = on_lost
        self._closing = False
        self._losing = threading.Lock()
        self._step = 0
        self._awaited = (0, 0)
        """The last step that wanted drafts, and its number of sequences."""
        self._late_since: float | None = None
        """When it was sent, if its answer is overdue."""
        self._misses = 0
        """Steps in a row that were asked for and came too late."""
        self._rest_steps = 0
        """Steps before the service is asked again."""
        self._held_back: dict[int, list[np.ndarray]] = {}
        """By sequence: tokens committed that the service has not been told of."""
        self._offered: dict[int, int] = {}
        """The running sequences, each with the tokens of its last draft."""
        self._requests: queue.SimpleQueue[pb.DraftRequest | None] = queue.SimpleQueue()
        self._replies: queue.SimpleQueue[pb.DraftResponse | None] = queue.SimpleQueue()
        self._channel = grpc.insecure_channel(
            self.address,
            options=[
                ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
                ("grpc.max_send_message_length", MAX_MESSAGE_BYTES),
            ],
        )
        self._check_health()
        stream = drafter_pb2_grpc.DrafterServiceStub(self._channel).Draft(self._outgoing())
        self._reader = threading.Thread(target=self._read, args=(stream,), name="ssd-client", daemon=True)
        self._reader.start()

    def start(self, sequence_id: int, prompt: np.ndarray) -> None:
        """Begin a sequence with its prompt, uint32 [P]. Raises ValueError for an id in use or a token out of range."""
        if sequence_id in self._offered:
            raise ValueError(f"sequence {sequence_id} was started before and not finished")
        check_tokens(prompt)
        start = pb.Start(sequence_id=sequence_id, prompt=pack(prompt, "u4"))
        self._offered[sequence_id] = 0
        self._send(pb.DraftRequest(starts=[start]))

    def draft(self, progress: Progress) -> DraftBatch:
        """Tell what was committed and wait for drafts, at most until the deadline.

        Raises ValueError as `Progress.check` does.
        """
        progress.check(self._offered)
        sequences = len(progress.sequence_ids)
        if self.lost is None and (self._is_behind() or self._is_resting()):
            self._hold_back(progress)
            drafts = None
        else:
            self._send(pb.DraftRequest(batch=batch_message(self._with_held_back(progress))))
            self._awaited = (self._step, sequences)
            sent_at = time.monotonic()
            drafts = self._receive(self._deadline_s)
            self._note_outcome(in_time=drafts is not None, sent_at=sent_at)
        if drafts is None:
            self.timeouts += self.lost is None
            drafts = DraftBatch.empty(sequences)
        self._offered.update(zip(progress.sequence_ids.tolist(), np.diff(drafts.offsets).tolist(), strict=True))
        return drafts

    def finish(
        self, sequence_id: int, tokens: np.ndarray, *, verified: int = 0, accepted: int = 0, learn: bool = True
    ) -> None:
        """End a sequence; `tokens`, uint32 [n], were committed since its last draft. Raises ValueError as `draft`."""
        check_tokens(tokens)
        check_outcome(sequence_id, verified, accepted, self._offered)
        finish = pb.Finish(
            sequence_id=sequence_id,
            tokens=pack(np.concatenate([*self._held_back.pop(sequence_id, []), tokens]), "u4"),
            learn=learn,
            verified=verified,
            accepted=accepted,
        )
        del self._offered[sequence_id]
        self._send(pb.DraftRequest(finishes=[finish]))

    def close(self) -> None:
        """Let the service take what was sent, then end the stream."""
        self._closing = True
        self._requests.put(None)
        self._reader.join(CLOSE_TIMEOUT_S)
        self._channel.close()

    def _check_health(self) -> None:
        request = health_pb2.HealthCheckRequest(service=pb.DESCRIPTOR.services_by_name["DrafterService"].full_name)
        try:
            answer = health_pb2_grpc.HealthStub(self._channel).Check(
                request, timeout=CONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.RpcError as error:
            self._channel.close()
            what = (
                "no drafter answers"
                if _is_absence(error)
                else f"something other than a drafter ({_reason(error)}) answers"
            )
            raise UserError(
                f"{what} at {self.address}; start one with: ssd-drafter serve --listen {self.address}"
            ) from None
        if answer.status != health_pb2.HealthCheckResponse.SERVING:
            self._channel.close()
            raise UserError(f"the drafter at {self.address} is not serving; it may be shutting down")

    def _send(self, request: pb.DraftRequest) -> None:
        self._step += 1
        if self.lost is None:
            request.step = self._step
            self._requests.put(request)

    def _receive(self, wait_s: float) -> DraftBatch | None:
        """The drafts of the awaited step; None if they do not come in time, or never will."""
        step, sequences = self._awaited
        until = time.monotonic() + wait_s
        while self.lost is None:
            try:
                reply = self._replies.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return None
            if reply is None:
                continue  # The service is lost.
            try:
                if reply.HasField("error"):
                    raise WireError(reply.error.message)
                if reply.step == step:
                    return read_drafts(reply.drafts, sequences)
            except WireError as problem:
                # One of the two sides is wrong about the contract; requests must not suffer for it.
                self._lose(f"it and this client disagree: {problem}")
        return None

    def _is_behind(self) -> bool:
        """Whether an answer is still overdue; one that has come by now is of no use any more."""
        if self._late_since is None:
            return False
        if self._receive(0.0) is not None:
            self._late_since = None
            return False
        silent_s = time.monotonic() - self._late_since
        if silent_s > self._patience_s:
            self._lose(f"it has not answered for {silent_s:.0f} s")
        return True

    def _is_resting(self) -> bool:
        """Whether a service that was late again and again is left alone in this step."""
        if self._rest_steps == 0:
            return False
        self._rest_steps -= 1
        return True

    def _note_outcome(self, *, in_time: bool, sent_at: float) -> None:
        """After each miss in a row let twice as many steps pass before asking again."""
        self._misses = 0 if in_time else self._misses + 1
        self._rest_steps = (1 << min(max(0, self._misses - 1), MAX_REST_DOUBLINGS)) - 1
        self._late_since = None if in_time else sent_at

    def _hold_back(self, progress: Progress) -> None:
        # Counts are left out: what had been offered before the late step is a detail of statistics.
        for index, sequence_id in enumerate(progress.sequence_ids.tolist()):
            committed = progress.tokens[progress.offsets[index] : progress.offsets[index + 1]].copy()
            self._held_back.setdefault(sequence_id, []).append(committed)

    def _with_held_back(self, progress: Progress) -> Progress:
        """`progress`, with what was held back of its sequences before it."""
        if not self._held_back:
            return progress
        self._hold_back(progress)
        runs = [np.concatenate(self._held_back.pop(sequence_id)) for sequence_id in progress.sequence_ids.tolist()]
        offsets = offsets_of(np.array([len(run) for run in runs]))
        return replace(progress, tokens=np.concatenate([*runs, np.empty(0, np.uint32)]), offsets=offsets)

    def _outgoing(self) -> Iterator[pb.DraftRequest]:
        while (request := self._requests.get()) is not None:
            yield request

    def _read(self, stream: Iterator[pb.DraftResponse]) -> None:
        try:
            for reply in stream:
                self._replies.put(reply)
            reason = "it ended the stream"
        except grpc.RpcError as error:
            reason = _reason(error)
        self._lose(reason)
        self._replies.put(None)

    def _lose(self, reason: str) -> None:
        """Draft no more; both threads may find out at once."""
        with self._losing:
            is_news = self.lost is None and not self._closing
            self.lost = self.lost or reason
        self._requests.put(None)
        if is_news:
            self._on_lost(reason)


def _is_absence(error: grpc.RpcError) -> bool:
    return error.code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)


def _reason(error: grpc.RpcError) -> str:
    return str(error.details() or error.code().name)
