"""Which draft tokens are worth verifying: step-time curves, the selection of tokens, and pauses of drafting."""
