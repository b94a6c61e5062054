"""Small networks that draft on a CPU, compiled: 8-bit weights, and one call for the whole draft of a batch."""

from pathlib import Path

from engine.drafters import calibration
from ssd.kernels import jit, noise

jit.drop_stale_kernels(Path(__file__).parent, calibration, jit, noise)
