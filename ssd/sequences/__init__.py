"""Running sequences: their tables, and an index of the text of each."""
