"""A drafter as a gRPC service for engines, and its client."""
