"""Page tables of sequences that no scheduler runs."""

import numpy as np

from engine.scheduling.table import PAGES


def give_pages(sequence, pages):
    """Let a sequence that has no row in a table own pages."""
    sequence.page_table = np.array([*pages], np.int32)
    sequence.state[PAGES] = len(sequence.page_table)


def install(state, slot, sequence):
    """Copy a sequence with its pages to a slot of a state on the device."""
    state.install([slot], [sequence], texts=True)
    places = np.arange(len(sequence.pages))
    state.add_pages(np.stack((slot * state.page_tables.shape[1] + places, sequence.pages)))
