"""Reports, metrics, logs and traces."""
