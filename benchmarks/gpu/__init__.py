"""Benchmark of the engine on a GPU, in named parts with target figures."""
