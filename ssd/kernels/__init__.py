"""Compiled kernels: the drafting step, and what it matches, estimates, grows and learns."""
