"""A drafter as a gRPC service beside an engine, and the client that engines use."""
