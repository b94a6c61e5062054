"""Run a part of the GPU benchmark in this process."""

from benchmarks.gpu.figures import Figure
from benchmarks.gpu.parts import PARTS


def figures_of(bench, name):
    """Return the figures of a part; fail for values that no part may report."""
    [part] = [part for part in PARTS if part.name == name]
    found = list(part.run(bench))
    assert found
    assert all(isinstance(figure, Figure) and figure.value > 0 and figure.of >= 1 for figure in found)
    return found
