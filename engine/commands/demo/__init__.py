"""The demonstration: the same workload with and without drafts, faster as the corpus fills, with the same output."""
