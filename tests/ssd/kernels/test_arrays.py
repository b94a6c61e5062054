"""A kernel sees each declared array with the address, the shape and the dtype that its owner gave it."""

from typing import Annotated, NamedTuple

import numpy as np
import pytest

from ssd.budget.curve import StepCurve
from ssd.budget.token_budget import TokenBudget
from ssd.corpus.corpus import Corpus
from ssd.kernels.arrays import arrays_in, opener
from ssd.kernels.budget import open_budget
from ssd.kernels.cache import fingerprint
from ssd.kernels.jit import outline
from ssd.kernels.step import IS_TREE, MATCH_DEPTH, Model, StepFrame, open_frame
from ssd.sequences.tables import Sequences
from ssd.stats import Stats


def budget():
    return TokenBudget(StepCurve.unknown())


def frame():
    corpus = Corpus(10_000)
    model = Model(corpus.learned, corpus.fallback.arrays)
    return StepFrame(Sequences(3), model, budget(), Stats(), match_depth=7, is_tree=True)


@pytest.mark.parametrize(("make", "open_addresses"), [(frame, open_frame), (budget, open_budget)])
def test_a_kernel_sees_the_arrays_of_their_owner(make, open_addresses):
    owner = make()
    seen = outline(lambda addresses: open_addresses(addresses))(owner.addresses)
    places = [[(each.ctypes.data, each.shape, each.dtype) for each in arrays_in(part)] for part in (seen, owner.arrays)]
    assert places[0] == places[1]


def test_settings_precede_the_addresses():
    addresses = frame().addresses
    assert (addresses[MATCH_DEPTH], addresses[IS_TREE]) == (7, 1)


def test_another_shape_is_another_kernel():
    """A cached kernel would write beyond an array that has become smaller."""

    def opener_of(size):
        class Declared(NamedTuple):
            numbers: Annotated[np.ndarray, np.int64, size]

        return opener(Declared)

    assert fingerprint(opener_of(3)) == fingerprint(opener_of(3)) != fingerprint(opener_of(4))
