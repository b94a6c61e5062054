"""The state of running sequences on the device, and what needs nothing else: inputs of a step and verification."""
