"""One OpenAI-compatible HTTP server with retrieval and blended chunk KV. See docs/serve.md."""
