"""Checks that an engine, or a service, follows the protocol (docs/integrating.md)."""
