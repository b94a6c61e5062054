"""What the service counts, for Prometheus. Reads facts; knows nothing of sockets but its own, and nothing of gRPC."""
