"""Bodies of requests whose result is a vector or a score, and of their answers.

Names and defaults are those of OpenAI (embeddings), Cohere and Jina (rerank) and vLLM. A field that
is not listed here is refused by name.
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from engine.messages.pooling import PoolingParams, PoolingTask
from engine.server.bodies import QueuedBody

Input = str | list[str | int | list[int]]
"""One text, several, the token ids of one, or of several."""
Encoding = Literal["float", "base64"]
INPUT_NAMES: dict[str, tuple[str, ...]] = {"prompt": ("input",), "prompt_token_ids": ("input",)}


class PooledBody(QueuedBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of all these requests."""

    no_effect: ClassVar[dict[str, tuple[Any, ...]]] = {
        "embed_dtype": ("float32",),
        "endianness": ("native", "little"),
        "padding": ("do_not_pad",),
        "truncation_side": ("right",),
    }
    flat: ClassVar[tuple[str, ...]] = ()
    """Fields whose type cannot be nested, although other bodies have nested ones of that name."""

    model: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None

    def params(self, task: PoolingTask | None, dimensions: int | None = None) -> PoolingParams:
        """The parameters for the engine. Raises ``RequestError`` for a value out of range."""
        return PoolingParams(
            task=task,
            dimensions=dimensions,
            use_activation=self.use_activation,
            truncate_prompt_tokens=self.truncate_prompt_tokens,
        )


class InputBody(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests for results of single texts."""

    client_names: ClassVar = INPUT_NAMES
    flat: ClassVar = ("input",)

    input: Input
    add_special_tokens: bool = True
    prompt_name: str | None = None


class EmbeddingRequest(InputBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/embeddings``."""

    encoding_format: Encoding = "float"
    dimensions: int | None = None


class PoolingRequest(InputBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /pooling``."""

    encoding_format: Encoding = "float"
    dimensions: int | None = None
    task: PoolingTask | None = None


class ClassifyRequest(InputBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /classify``."""


class ScoreRequest(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /score``."""

    client_names: ClassVar = {"data_1": ("text_1",), "data_2": ("text_2",)}
    no_effect: ClassVar = {
        **PooledBody.no_effect,
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
    }
    flat: ClassVar = ("text_1", "text_2")

    text_1: str | list[str]
    text_2: str | list[str]


class RerankRequest(PooledBody, kw_only=True, forbid_unknown_fields=True):
    """The body of ``POST /rerank``."""

    client_names: ClassVar = {"data_1": ("query",), "data_2": ("documents",)}
    no_effect: ClassVar = {
        **PooledBody.no_effect,
        "max_chunks_per_doc": (0, 1),
        "max_tokens_per_doc": (0,),
        "max_tokens_per_query": (0,),
        "rank_fields": ([], ["text"]),
    }

    query: str
    documents: list[str | dict[str, Any]]
    top_n: int | None = None
    return_documents: bool = True


class PooledUsage(msgspec.Struct):
    """Numbers of tokens of all inputs, with special tokens and prompts of the model."""

    prompt_tokens: int
    total_tokens: int


class Answer(msgspec.Struct, kw_only=True):
    """What the answers in OpenAI's form begin with."""

    id: str
    object: str = "list"
    created: int
    model: str


class Embedding(msgspec.Struct, kw_only=True):
    """The embedding of one input: numbers, or float32 numbers (little-endian) as base64."""

    object: str = "embedding"
    index: int
    embedding: list[float] | str


class EmbeddingAnswer(Answer, kw_only=True):
    """The answer to ``/v1/embeddings``, in the order of the inputs."""

    data: list[Embedding]
    usage: PooledUsage


class Pooled(msgspec.Struct, kw_only=True):
    """The result of one input; ``shape``: that of data in base64."""

    object: str = "pooling"
    index: int
    data: list[Any] | str
    shape: list[int] | msgspec.UnsetType = msgspec.UNSET


class PoolingAnswer(Answer, kw_only=True):
    """The answer to ``/pooling``, in the order of the inputs."""

    data: list[Pooled]
    usage: PooledUsage


class Classified(msgspec.Struct, kw_only=True):
    """The classes of one input; ``label``: that with the highest probability."""

    index: int
    label: str | None
    probs: list[float]
    num_classes: int


class ClassifyAnswer(Answer, kw_only=True):
    """The answer to ``/classify``, in the order of the inputs."""

    data: list[Classified]
    usage: PooledUsage


class Score(msgspec.Struct, kw_only=True):
    """The score of one pair."""

    index: int
    object: str = "score"
    score: float


class ScoreAnswer(Answer, kw_only=True):
    """The answer to ``/score``, in the order of the pairs."""

    data: list[Score]
    usage: PooledUsage


class Reranked(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A document with its score; ``index``: its place in the request."""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class RerankAnswer(msgspec.Struct, kw_only=True):
    """The answer to ``/rerank``, the best document first."""

    id: str
    model: str
    results: list[Reranked]
    usage: PooledUsage
