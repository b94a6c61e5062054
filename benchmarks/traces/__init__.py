"""Recorded traffic: reading it, and making it from public repositories (`python -m benchmarks.traces fetch all`)."""

from benchmarks.traces.reading import Request, Trace, copy_edit, load_trace

__all__ = ["Request", "Trace", "copy_edit", "load_trace"]
