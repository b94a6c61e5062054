"""The time of a step of the engine on the host."""
