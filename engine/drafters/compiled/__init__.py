"""Small networks that draft on a CPU, compiled: 8-bit weights, and one call for the whole draft of a batch."""
