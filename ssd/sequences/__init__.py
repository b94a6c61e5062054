"""Running sequences: their tables, and an index over each one's own text."""
