"""Other engines ("hosts") without speculation, with their own drafters, and with drafts of a sidecar."""
