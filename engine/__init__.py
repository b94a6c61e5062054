"""A target engine: runs a model, verifies drafts, and changes nothing but the speed."""
