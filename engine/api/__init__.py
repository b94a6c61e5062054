"""An OpenAI-compatible server around the engine: HTTP in one process, the engine in another."""
