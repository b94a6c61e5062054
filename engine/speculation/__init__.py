"""Which draft tokens a step verifies, and which of them are accepted."""
