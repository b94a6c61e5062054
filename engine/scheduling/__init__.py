"""Which sequences run in a step, and on which pages of the KV cache."""
