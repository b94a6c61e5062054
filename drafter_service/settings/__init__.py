"""Settings of the service and where they are read from."""
