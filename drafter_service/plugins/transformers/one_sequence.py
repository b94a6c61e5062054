"""Decoding of one sequence: the host's assisted decoding, with drafts as its candidates."""

from __future__ import annotations

from typing import Any

from drafter_service.plugins.options import End, RequestOptions
from drafter_service.plugins.session import HostSession
from drafter_service.plugins.step_clock import StepClock


def decode_one(
    session: HostSession,
    request_id: int,
    options: RequestOptions,
    model: Any,
    input_ids: Any,
    arguments: dict[str, Any],
) -> Any:
    """Run the host's assisted decoding, as one request of the session.

    input_ids: int64 [1, P]. arguments: those of the host's decoding methods. Returns the same as these.
    """
    prompt = input_ids[0].tolist()
    candidates = Candidates(session, request_id, prompt)
    session.start(request_id, prompt, options)
    try:
        result = type(model)._assisted_decoding(WithCandidates(model, candidates), input_ids, **arguments)
        text = getattr(result, "sequences", result)[0].tolist()
    except BaseException:
        session.finish(request_id, end=End.CANCELLED)
        raise
    session.finish(request_id, text)
    return result


class Candidates:
    """The drafts of one call of `generate`; has the interface of the host's `CandidateGenerator`."""

    requires_model_outputs = False

    def __init__(self, session: HostSession, request_id: int, prompt: list[int]) -> None:
        self._session = session
        self._request_id = request_id
        self._text = prompt.copy()
        self._clock = StepClock(session)

    def get_candidates(self, input_ids: Any, **_: Any) -> tuple[Any, None]:
        """Return the text with a draft after it, int64 [1, N + K]; `input_ids`: int64 [1, N], the text."""
        self._clock.end()
        is_first = input_ids.shape[1] == len(self._text)
        self._text += input_ids[0, len(self._text) :].tolist()
        draft = self._session.draft([(self._request_id, self._text)])[0]
        self._session.schedule({self._request_id: draft})
        # The first step also runs the prompt.
        self._clock.begin((len(self._text) if is_first else 1) + len(draft))
        if not draft:
            return input_ids, None
        size = len(self._text)
        candidates = input_ids.new_empty((1, size + len(draft)))
        candidates[:, :size] = input_ids
        candidates[0, size:] = input_ids.new_tensor(draft)
        return candidates, None

    def update_candidate_strategy(self, input_ids: Any, scores: Any, num_matches: int) -> None:
        """Do nothing: the session compares the next text with the draft."""


class WithCandidates:
    """A model as its `_assisted_decoding` sees it, except that its candidates are given. The model does not change."""

    def __init__(self, model: Any, candidates: Candidates) -> None:
        self._model = model
        self._candidates = candidates

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""
        return self._model(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def _get_candidate_generator(self, **_: Any) -> Candidates:
        return self._candidates
