"""Recorded traffic from public repositories (`python -m benchmarks.traces fetch all`), see `ssd.replay.Recording`."""
