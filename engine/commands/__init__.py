"""The commands of `ssd-engine`."""
