"""The shared log of finished requests through which sidecars learn the same text."""
