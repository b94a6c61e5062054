"""The commands of `ssd-drafter`, a file each or a few."""
