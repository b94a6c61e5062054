"""Comparison of drafters on the same prompts, and cost profiles of hardware."""
