"""A core without a model that pools: the result of a request is computed from its token ids."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import numpy as np

from engine.config.pooling import PoolingSpec
from engine.messages.pooling import PooledColumns
from engine.messages.requests import AddRequest, CoreOutputs, Finished
from engine.messages.vectors import Vectors
from support.fakes import FakeClient, FakeDecided, Live

WIDTH = 4
VOCAB = 1000
BEGIN, END = 1, 2  # special tokens around each text
WORD = 10  # of the first word


class Words:
    """A tokenizer of numbers: "3 7" is two tokens, between two special ones."""

    eos_token_id = None
    vocab_size = VOCAB
    max_chars_per_token = None
    response_template = None
    pair_layout = None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        words = [3 if word == "a" else WORD + int(word) for word in re.findall(r"\d+|a", text)]
        return [BEGIN, *words, END] if add_special_tokens else words

    def encode_all(self, texts: list[str]) -> list[list[int]]:
        return [self.encode(text) for text in texts]

    def cut(self, token_ids: list[int], num_kept: int) -> list[int]:
        return token_ids[:num_kept]


def counts(request: AddRequest) -> Vectors:
    """A result: how often each remainder occurs among the words."""
    words = np.array([i for i in request.prompt_token_ids if i >= WORD], np.int64)
    return np.bincount(words % WIDTH, minlength=WIDTH).astype(np.float32)


class PoolingClient(FakeClient):
    """Computes at most ``seats`` requests in a step, those of the lowest priority first."""

    def __init__(
        self,
        result: Callable[[AddRequest], Vectors] = counts,
        seats: int = 64,
        max_model_len: int = 32,
        **options: Any,
    ) -> None:
        kinds = ("pooling", "only_pooling")
        decided = FakeDecided(max_model_len=max_model_len, vocab_size=VOCAB, capabilities=kinds)
        super().__init__(lambda request, position: 0, decided, **options)
        self.result = result
        self.seats = seats
        self.failing: dict[str, str] = {}  # text in an id -> message
        self.done: list[AddRequest] = []

    def step(self) -> list[CoreOutputs]:
        live = self.live
        ranked = sorted(live.values(), key=lambda each: each.request.priority)[: self.seats]
        self.live = {each.request.request_id: each for each in ranked}
        try:
            return super().step()
        finally:
            finished = {each.request.request_id for each in ranked} - self.live.keys()
            self.live = {name: each for name, each in live.items() if name not in finished}

    def advance(self, index: int, row: Live, batch: CoreOutputs) -> None:
        request = row.request
        self.done.append(request)
        del self.live[request.request_id]
        batch.counts = [0] * len(batch.request_ids)
        for part, message in self.failing.items():
            if part in request.request_id:
                batch.finished.append(Finished(index, "error", message=message))
                return
        assert request.pooling is not None and request.max_tokens == 1
        vectors = self.result(request)
        old = batch.pooled or PooledColumns([], [], [], b"")
        batch.pooled = PooledColumns(
            [*old.rows, index],
            [*old.sizes, vectors.size],
            [*old.widths, vectors.shape[-1]],
            old.values + vectors.astype("<f4").tobytes(),
        )
        batch.finished.append(Finished(index, "stop"))


def spec(**fields: Any) -> PoolingSpec:
    """What the directory of such a model says."""
    values = {"task": "embed", "mode": "mean", "hidden_size": WIDTH, "activation": "normalize"}
    return PoolingSpec(**{**values, "is_activated": True, **fields})
