"""Endpoints that clients know from elsewhere and that are not there: refused by the name of what they are for."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_FEATURES: Mapping[str, str] = MappingProxyType({
    "/v1/embeddings": "embeddings are",
    "/v1/responses": "the Responses API is",
    "/v1/messages": "Anthropic's Messages API is",
    "/v1/conversations": "the Conversations API is",
    "/v1/assistants": "the Assistants API is",
    "/v1/threads": "the Assistants API is",
    "/v1/vector_stores": "vector stores are",
    "/v1/realtime": "the Realtime API is",
    "/v1/audio": "audio is",
    "/v1/images": "images are",
    "/v1/videos": "videos are",
    "/v1/moderations": "moderations are",
    "/v1/files": "uploads are",
    "/v1/uploads": "uploads are",
    "/v1/batches": "batches over HTTP (`tokenyard run-batch` takes a file of them) are",
    "/v1/fine_tuning": "fine-tuning is",
    "/v1/load_lora_adapter": "LoRA adapters are",
    "/v1/unload_lora_adapter": "LoRA adapters are",
    "/v1/score": "scoring is",
    "/score": "scoring is",
    "/v1/rerank": "reranking is",
    "/v2/rerank": "reranking is",
    "/rerank": "reranking is",
    "/pooling": "pooling is",
    "/classify": "classification is",
})  # fmt: skip
"""By path, for all paths below it too."""


def feature_of(path: str) -> str | None:
    """What an endpoint would be for, with its verb; None for one that nobody has heard of."""
    parts = path.split("/")
    known = ("/".join(parts[:length]) for length in range(2, min(len(parts), 3) + 1))
    return next((_FEATURES[prefix] for prefix in known if prefix in _FEATURES), None)
