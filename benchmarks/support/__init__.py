"""What several benchmarks share; the commands are one level up."""
