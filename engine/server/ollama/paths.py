"""Paths of Ollama's requests that a core computes, and what they do, for traces."""

OLLAMA_PATHS = {
    "/api/chat": "chat",
    "/api/generate": "text_completion",
    "/api/embed": "embeddings",
    "/api/embeddings": "embeddings",
}
