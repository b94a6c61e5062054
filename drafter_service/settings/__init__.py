"""Settings of the sidecar: what there is, and where it is read from."""
