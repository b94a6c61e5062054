"""Durations of the steps of a target on given hardware, measured or estimated."""
