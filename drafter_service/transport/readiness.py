"""How a service says what it does while it is not ready to serve."""

STATE = "ssd-drafter-state"
"""Metadata of responses to health checks, such as "compiling kernels, 40 %"."""
NOT_READY = "not ready: "
"""Start of the details of calls that are refused with UNAVAILABLE meanwhile; the state follows."""
