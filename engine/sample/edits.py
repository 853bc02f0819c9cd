"""What a request does to its logits before the choice: one small closure for each thing asked.

An edit changes a row [V] in place, given the history: all token ids before the one being sampled,
prompt and output. Requests that ask for nothing have none and cost nothing. The history lives in
the worker's token table alone, so nothing here has to be rebuilt after a preemption.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch

from engine.messages.step import Column, NewSeq
from engine.sample.processors import LogitsProcessorFactory, NamedProcessor
from kernels.sampling import penalise

Edit = Callable[[torch.Tensor, Column], None]


def edits_of(
    seq: NewSeq, factories: Sequence[LogitsProcessorFactory], device: torch.device
) -> list[Edit]:
    """The edits a request asks for, in the order they are applied to logits on `device`."""
    steps = (
        allowed_tokens(seq, device),
        logit_bias(seq, device),
        bad_words(seq, device),
        min_tokens(seq, device),
        penalties(seq),
        *custom_processors(seq, factories),
        # Then, in the kernel that chooses: temperature, min-p, top-k, top-p, noise.
    )
    return [edit for edit in steps if edit is not None]


def allowed_tokens(seq: NewSeq, device: torch.device) -> Edit | None:
    """Only these token ids remain."""
    if seq.params.allowed_token_ids is None:
        return None
    allowed = torch.tensor(seq.params.allowed_token_ids, device=device)

    def edit(logits: torch.Tensor, history: Column) -> None:
        kept = logits[allowed]
        logits.fill_(-torch.inf)
        logits[allowed] = kept

    return edit


def logit_bias(seq: NewSeq, device: torch.device) -> Edit | None:
    """Added to the logits of single tokens."""
    if not seq.params.logit_bias:
        return None
    ids = torch.tensor(list(seq.params.logit_bias), device=device)
    bias = torch.tensor(list(seq.params.logit_bias.values()), dtype=torch.float32, device=device)

    def edit(logits: torch.Tensor, history: Column) -> None:
        logits[ids] += bias

    return edit


def bad_words(seq: NewSeq, device: torch.device) -> Edit | None:
    """No output may contain these: the last token of a word is masked behind its first ones."""
    if not seq.bad_words_ids:
        return None
    single = [word[0] for word in seq.bad_words_ids if len(word) == 1]
    always = torch.tensor(single, dtype=torch.int64, device=device)
    longer = [np.array(word, dtype=np.int32) for word in seq.bad_words_ids if len(word) > 1]

    def edit(logits: torch.Tensor, history: Column) -> None:
        output = history[seq.num_prompt :]
        logits[always] = -torch.inf
        for word in longer:
            start = len(output) + 1 - len(word)
            if start >= 0 and np.array_equal(output[start:], word[:-1]):
                logits[int(word[-1])] = -torch.inf

    return edit


def min_tokens(seq: NewSeq, device: torch.device) -> Edit | None:
    """Nothing that ends the request is sampled while it has fewer output tokens than asked."""
    if not seq.params.min_tokens or not seq.stop_token_ids:
        return None
    stops = torch.tensor(seq.stop_token_ids, device=device)
    num_free = seq.num_prompt + seq.params.min_tokens

    def edit(logits: torch.Tensor, history: Column) -> None:
        if len(history) < num_free:
            logits[stops] = -torch.inf

    return edit


def penalties(seq: NewSeq) -> Edit | None:
    """Repetition over prompt and output, presence and frequency over the output."""
    params = seq.params
    asked = (params.repetition_penalty, params.presence_penalty, params.frequency_penalty)
    if asked == (1.0, 0.0, 0.0):
        return None

    def edit(logits: torch.Tensor, history: Column) -> None:
        penalise(logits, history, seq.num_prompt, asked)

    return edit


def custom_processors(seq: NewSeq, factories: Sequence[LogitsProcessorFactory]) -> list[Edit]:
    """Those of the engine's custom processors that want this request."""
    processors = [NamedProcessor(factory, seq) for factory in factories]
    return [processor for processor in processors if processor.is_wanted]
