"""Demonstration: one workload with and without drafts, faster as the corpus grows, with the same output."""
