"""Settings of the service, and the files, variables and flags that they are read from."""

DEFAULT_ADDRESS = "unix:/tmp/ssd-drafter.sock"
"""Default address of `ssd-drafter serve`."""
