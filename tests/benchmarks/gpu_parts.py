"""A part of the GPU benchmark, run at once."""

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import PARTS


def figures_of(bench, name):
    """What the part reports; values that no part may report fail."""
    [part] = [part for part in PARTS if part.name == name]
    found = list(part.run(bench))
    assert found
    assert all(isinstance(figure, Figure) and figure.value > 0 and figure.of >= 1 for figure in found)
    return found
