"""Replays whose tables the documentation shows: `python -m benchmarks.evidence` (`make evidence`)."""
