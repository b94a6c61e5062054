"""The service: streams, sessions, namespaces and their storage, and administration."""
