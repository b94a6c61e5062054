"""Benchmark of the engine on a GPU, divided into named parts with target figures."""
