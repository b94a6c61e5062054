"""Finished requests in a ring buffer, and the suffix array over them."""
