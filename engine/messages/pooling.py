"""Pooled requests, whose result is a vector and not text: parameters, results, users' outputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Generic, Literal, TypeVar, get_args

import msgspec

from engine.errors import RequestError, RequestTypeError

if TYPE_CHECKING:
    from engine.messages.vectors import Vectors  # imports numpy, which clients need not load

PoolingTask = Literal["embed", "classify", "token_embed", "token_classify"]
"""What a pooled request returns: one vector, the scores of one text, or either for each token."""
TOKEN_TASKS = ("token_embed", "token_classify")


class PoolingParams(msgspec.Struct, kw_only=True, frozen=True, omit_defaults=True):
    """Parameters of a pooled request; the names are vLLM's."""

    task: PoolingTask | None = None
    """``None``: the model's own, ``embed`` or ``classify``."""
    dimensions: int | None = None
    """Keep this many numbers of an embedding, for Matryoshka models; ``None``: all."""
    use_activation: bool | None = None
    """Normalise an embedding, or apply the softmax or sigmoid to scores. ``None``: as the model
    says."""
    truncate_prompt_tokens: int | None = None
    """Keep at most this many tokens of the prompt, the first ones; -1: as many as fit. ``None``:
    a longer prompt is refused, unless the model's directory has a maximum length."""
    skip_reading_prefix_cache: bool = False
    """Compute the whole prompt."""
    second_text_start: int | None = None
    """Index of the first token of the second text of a pair, for models that distinguish the two;
    set by the front end."""

    def __post_init__(self) -> None:
        if self.task is not None and self.task not in get_args(PoolingTask):
            raise RequestError(
                f"task is {self.task!r:.80}, must be one of: {', '.join(get_args(PoolingTask))}",
                param="task",
            )
        for name in ("dimensions", "truncate_prompt_tokens"):
            if type(value := getattr(self, name)) not in (int, type(None)):
                message = f"{name} is {value!r:.80}, must be a whole number"
                raise RequestTypeError(message, param=name)
        if self.dimensions is not None and self.dimensions < 1:
            raise RequestError(
                f"dimensions is {self.dimensions}, must be 1 or more", param="dimensions"
            )
        kept = self.truncate_prompt_tokens
        if kept is not None and kept != -1 and kept < 1:
            raise RequestError(
                f"truncate_prompt_tokens is {kept}, must be 1 or more, or -1 for as many as fit",
                param="truncate_prompt_tokens",
            )

    @property
    def is_by_token(self) -> bool:
        """True if the result has a vector for each token."""
        return self.task in TOKEN_TASKS

    @property
    def reads_all(self) -> bool:
        """True if every token is computed, so that no prefix is taken from the cache."""
        return self.skip_reading_prefix_cache or self.is_by_token


class PooledColumns(msgspec.Struct, array_like=True, gc=False):
    """Results of pooled requests for one client, as in ``PooledPart``.

    ``rows``: of ``CoreOutputs``; ``values``: float32, little-endian."""

    rows: list[int]
    sizes: list[int]
    widths: list[int]
    values: bytes

    def pick(self, place_of: Mapping[int, int]) -> PooledColumns | None:
        """The results of some rows only. ``place_of``: the new place of each row to keep; ``None``
        if no row has a result."""
        found = sorted((place_of[row], *entry) for row, *entry in self.entries() if row in place_of)
        if not found:
            return None
        rows, widths, values = zip(*found, strict=True)
        sizes = [len(each) // 4 for each in values]
        return PooledColumns(list(rows), sizes, list(widths), b"".join(values))

    def entries(self) -> Iterator[tuple[int, int, bytes]]:
        """For each result: its row, the numbers in a vector, and its values."""
        begin = 0
        for row, size, width in zip(self.rows, self.sizes, self.widths, strict=True):
            yield row, width, self.values[begin : begin + 4 * size]
            begin += 4 * size


class PoolingOutput(msgspec.Struct, gc=False):
    """The result of a pooled request: [width], or [tokens, width] for a task by token."""

    data: Vectors


class EmbeddingOutput(msgspec.Struct, gc=False):
    """An embedding."""

    embedding: list[float]

    @property
    def hidden_size(self) -> int:
        """Numbers of the embedding."""
        return len(self.embedding)


class ClassificationOutput(msgspec.Struct, gc=False):
    """The probability, or the score, of each class."""

    probs: list[float]

    @property
    def num_classes(self) -> int:
        return len(self.probs)


class ScoringOutput(msgspec.Struct, gc=False):
    """How well two texts fit together; higher is better."""

    score: float


R = TypeVar("R", PoolingOutput, EmbeddingOutput, ClassificationOutput, ScoringOutput)


class PoolingRequestOutput(msgspec.Struct, Generic[R], gc=False):
    """What a pooled request returns to the user."""

    request_id: str
    result: R | None
    """``None`` if the request has failed; ``error`` says why."""
    prompt_token_ids: list[int]
    num_cached_tokens: int = 0
    error: str | None = None
    code: str | None = None
    """Error code, as in ``CompletionOutput.code``."""
    finished: bool = True

    @property
    def outputs(self) -> R:
        """The result. Raises ``RequestError`` if the request has failed."""
        if self.result is None:
            raise RequestError(
                f"request {self.request_id!r:.80} has failed: {self.error}", code=self.code
            )
        return self.result


EmbeddingRequestOutput = PoolingRequestOutput[EmbeddingOutput]
ClassificationRequestOutput = PoolingRequestOutput[ClassificationOutput]
ScoringRequestOutput = PoolingRequestOutput[ScoringOutput]
