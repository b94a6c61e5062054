"""Tensor parallelism: one process per rank runs a part of every step."""
