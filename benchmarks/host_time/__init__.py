"""The engine's time on the host per step."""
