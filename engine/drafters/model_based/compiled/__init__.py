"""Small networks that draft on a CPU, compiled: 8-bit weights, and one call for the whole draft of a batch."""

from pathlib import Path

from ssd.kernels.jit import drop_stale_kernels

drop_stale_kernels(Path(__file__).parent)
