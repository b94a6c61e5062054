"""The command line `ssd-drafter`."""
