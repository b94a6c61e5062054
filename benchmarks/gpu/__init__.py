"""What the engine does on a GPU, in named parts, against the figures it is meant to reach."""
