"""Simpler drafters, to compare with: the classic scheme, and prompt lookup."""
