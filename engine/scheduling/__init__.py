"""Scheduling: the sequences of each step, and their pages of the KV cache."""
