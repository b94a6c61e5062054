"""Authentication and authorization: TLS, tokens, callers and their rights."""
