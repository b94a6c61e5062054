"""All remembered tokens and their index: ring buffer, suffix arrays, live tier, snapshots."""
