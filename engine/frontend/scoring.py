"""Scores of pairs of texts: by a cross-encoder, or by comparing the embeddings of both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from engine.errors import RequestError
from engine.frontend.encoding import Prompt
from engine.frontend.pooling import PooledTexts, pooled_output
from engine.messages.pooling import PoolingParams, ScoringOutput, ScoringRequestOutput
from engine.messages.requests import RequestOutput
from engine.messages.vectors import Vectors

BY_TOKEN = ("maxsim", "meanmaxsim")
Side = Literal[0, 1]
"""One of the two texts of a pair: 0 is the query, 1 the document."""


class Origin(NamedTuple):
    """The input that a prompt was made of. A prompt of both texts of a pair has the second."""

    side: Side
    place: int


@dataclass(frozen=True)
class Comparison:
    """The prompts to compute for the scores of pairs."""

    prompts: list[Prompt]
    params: list[PoolingParams]
    origins: list[Origin]
    """The input that each prompt was made of."""
    parts: list[tuple[int, ...]]
    """For each pair the indices of its prompts: the query's and the document's, or that of both."""
    similarity: str
    """Compares the results of both prompts; empty if the result of one is the score."""
    counted: Mapping[int, list[int]]
    """Which vectors of a result count, by the index of its prompt; all of others."""

    @property
    def is_by_token(self) -> bool:
        """Whether the results have a vector for each token, and take long to compare."""
        return self.similarity in BY_TOKEN

    def score(self, places: Sequence[int], results: Sequence[Vectors]) -> float:
        """The score of one pair. places: of its prompts, as in ``parts``; results: of them."""
        if not self.similarity:
            return float(results[0][0])
        one, other = (
            each[self.counted.get(place, slice(None))].astype(np.float64)
            for place, each in zip(places, results, strict=True)
        )
        return similarity(self.similarity, one, other)

    def outputs(self, every: Sequence[RequestOutput]) -> list[ScoringRequestOutput]:
        """The output of each pair. every: the last output of each prompt. A pair has failed if a
        request of it has."""
        return [self._output(places, [every[i] for i in places]) for places in self.parts]

    def _output(
        self, places: tuple[int, ...], outputs: list[RequestOutput]
    ) -> ScoringRequestOutput:
        results = [output.pooled for output in outputs if output.pooled is not None]
        about = next((each for each in outputs if each.pooled is None), outputs[-1])
        return replace(
            pooled_output(about, lambda _: ScoringOutput(self.score(places, results))),
            prompt_token_ids=[i for output in outputs for i in output.prompt_token_ids],
            num_cached_tokens=sum(output.num_cached_tokens for output in outputs),
        )


def compare(
    texts: PooledTexts, data_1: Sequence[str], data_2: Sequence[str], params: PoolingParams
) -> Comparison:
    """Prepare the scores of pairs. A single text in ``data_1`` is paired with each of ``data_2``.

    Queries and documents get the model's prompts for them. Raises ``RequestError`` for lists of
    other lengths, and for a model that cannot compare."""
    num_1, num_2 = len(data_1), len(data_2)
    if not num_2 or num_1 not in (1, num_2):
        raise RequestError(
            f"data_1 has {num_1} texts and data_2 has {num_2}: give as many of both, or one and "
            "several",
            param="data_1" if num_2 else "data_2",
        )
    spec = texts.spec
    if spec is None:
        raise RequestError(
            "texts cannot be compared: the model's directory is not on this machine, and only it "
            "says how; compare the embeddings yourself"
        )
    if spec.task in ("classify", "token_classify"):
        return _together(texts, data_1, data_2, params)
    own = texts.resolved(params)
    prompts = [
        *texts.with_prompts(data_1, texts.prompt_name("query")),
        *texts.with_prompts(data_2, texts.prompt_name("document")),
    ]
    origins = [Origin(0, i) for i in range(num_1)] + [Origin(1, i) for i in range(num_2)]
    parts: list[tuple[int, ...]] = [(i if num_1 > 1 else 0, num_1 + i) for i in range(num_2)]
    default = "maxsim" if own.is_by_token else "cosine"
    kind = spec.similarity or default
    counted = {}
    if own.is_by_token and spec.skipped_tokens:
        for place in range(num_1, len(prompts)):
            prompts[place], counted[place] = texts.counted(prompts[place], own)
    return Comparison(prompts, [own] * len(prompts), origins, parts, kind, counted)


def _together(
    texts: PooledTexts, data_1: Sequence[str], data_2: Sequence[str], params: PoolingParams
) -> Comparison:
    """The comparison by a cross-encoder, which reads both texts of a pair in one prompt."""
    spec = texts.spec
    assert spec is not None
    if spec.task != "classify" or spec.width != 1:
        raise RequestError(
            f"texts cannot be compared: the model has {spec.width} classes, and a comparison needs "
            "a model with a single score; use classify"
        )
    own = texts.resolved(replace(params, task="classify"))
    pairs = [(data_1[i if len(data_1) > 1 else 0], text) for i, text in enumerate(data_2)]
    prompts, every = texts.pairs(pairs, own)
    origins = [Origin(1, i) for i in range(len(pairs))]
    return Comparison(prompts, every, origins, [(i,) for i in range(len(pairs))], "", {})


Wide = NDArray[np.float64]


def similarity(kind: str, one: Wide, other: Wide) -> float:
    """How similar two embeddings are, as sentence-transformers computes it; higher is more similar.

    kind: ``cosine``, ``dot``, ``euclidean`` and ``manhattan`` (distances with a minus sign) for
    vectors [width]; ``maxsim`` and ``meanmaxsim`` for a vector of each token, [tokens, width]."""
    if kind in BY_TOKEN:
        best = (one @ other.T).max(axis=1)
        return float(best.sum() if kind == "maxsim" else best.mean())
    if kind == "dot":
        return float(one @ other)
    if kind == "euclidean":
        return -float(np.linalg.norm(one - other))
    if kind == "manhattan":
        return -float(np.abs(one - other).sum())
    scale = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / max(scale, 1e-12)
