"""Paths of requests whose result is a vector or a score, and what they do, for traces."""

POOLED_PATHS = {
    "/v1/embeddings": "embeddings",
    "/rerank": "rerank",
    "/v1/rerank": "rerank",
    "/v2/rerank": "rerank",
    "/score": "score",
    "/v1/score": "score",
    "/classify": "classify",
    "/pooling": "pooling",
}
