"""OpenAI-compatible HTTP server: HTTP runs in one process, the engine in another."""
