"""Selection of the draft tokens that a step verifies, and their verification."""
