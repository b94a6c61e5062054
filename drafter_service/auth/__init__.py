"""Who may connect to the sidecar, and what they may do there."""
