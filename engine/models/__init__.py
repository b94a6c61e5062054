"""The models: their shape, their layers, and how they come out of folders."""
