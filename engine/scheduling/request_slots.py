"""Which sequence has which seat of the device's state."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as SequenceOf

from engine.executor.device_state import DeviceState
from engine.scheduling.sequence import Sequence


class Seats:
    """Gives and takes seats; what a sequence has on the device follows what it has on the host."""

    def __init__(self, state: DeviceState) -> None:
        """A state whose seats nobody has."""
        self._state = state
        self._free = list(range(state.idle))
        self._seats: dict[int, int] = {}
        """By sequence."""
        self._pages: dict[int, int] = {}
        """By sequence: pages in its table on the device."""

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence.sequence_id in self._seats

    def of(self, sequence: Sequence) -> int:
        """The seat of a sequence; a new one begins as the sequence is on the host."""
        seat = self._seats.get(sequence.sequence_id)
        if seat is None:
            seat = self._seats[sequence.sequence_id] = self._free.pop()
            self._state.sit(seat, sequence)
            self._pages[sequence.sequence_id] = len(sequence.pages)
        return seat

    def add_pages(self, sequences: SequenceOf[Sequence]) -> None:
        """Tell the device of pages that these, which all sit, have got since it was told last."""
        grown = [one for one in sequences if len(one.pages) > self._pages[one.sequence_id]]
        held = [self._pages[one.sequence_id] for one in grown]
        new = [one.pages[count:] for one, count in zip(grown, held, strict=True)]
        self._state.add_pages([self._seats[one.sequence_id] for one in grown], held, new)
        for one in grown:
            self._pages[one.sequence_id] = len(one.pages)

    def clear_but(self, running: Iterable[Sequence]) -> None:
        """Take back the seats of all others."""
        staying = {sequence.sequence_id for sequence in running}
        for sequence_id in [one for one in self._seats if one not in staying]:
            seat = self._seats.pop(sequence_id)
            del self._pages[sequence_id]
            self._state.rise(seat)
            self._free.append(seat)
