"""Executors: run steps on the device."""
