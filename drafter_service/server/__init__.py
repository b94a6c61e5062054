"""The gRPC service: streams, sessions, namespaces and their storage."""
