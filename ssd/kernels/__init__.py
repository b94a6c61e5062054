"""Compiled kernels: matching, estimating probabilities, growing drafts, and learning."""
