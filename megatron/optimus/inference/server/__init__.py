"""An OpenAI-compatible server: a paged cache, continuous batching over it, and the endpoints (docs/serving.md)."""
