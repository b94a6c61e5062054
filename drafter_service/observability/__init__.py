"""Reports, metrics and logs."""
