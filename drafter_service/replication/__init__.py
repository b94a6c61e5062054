"""The shared log of finished requests through which replicas learn the same text."""
