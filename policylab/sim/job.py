"""Job: a request of a workload, with its arrival, prompt and output length."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from engine.messages.params import SamplingParams
from engine.messages.pooling import PoolingParams
from engine.messages.requests import AddRequest

END = 0  # the token that ends a text; it occurs nowhere else
FILLER = 1  # the token that a simulated worker generates, except at the end
FIRST_TOKEN = 2
VOCABULARY = 50_000

ANSWER = "answer:"
"""Prefix of text names: ``answer:`` and a request id name the tokens that the request generated."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

OWN = 0
"""``max_tokens`` of a job whose caller knows the output length."""

TABLE_LENGTH = 1 << 20  # drawn once; each text is a part of this table
NUM_OWN = 2  # first tokens of a text, which are unique to it
NUM_WORDS = VOCABULARY - FIRST_TOKEN


class Span(NamedTuple):
    """A span of a text: ``length`` tokens from position ``start`` on. Texts of the same name are
    equal."""

    text: str
    length: int
    start: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A request of a workload. Times are seconds since the start of the run."""

    request_id: str
    arrival: float
    prompt: tuple[Span, ...]
    num_output: int
    """Output tokens, including the one that ends the text. Policies do not see this number, unless
    the experiment gives them an oracle."""
    user: str = ""
    priority: int = 0
    deadline: float | None = None
    """Seconds after its arrival by which the request should end."""
    ttft: float | None = None
    """Promised seconds from arrival to first token."""
    tbt: float | None = None
    """Promised seconds between two tokens."""
    tier: str = ""
    program: str = ""
    """The conversation or agent that the request belongs to."""
    adapter: str = ""
    """The name of its LoRA adapter; "" for the base model."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Further hints for policies; ``hints_for`` adds others."""
    max_tokens: int | None = None
    """The requested maximum of output tokens; ``None``: that of the workload; ``OWN``: its output
    length."""
    is_pooled: bool = False
    """True if its result is a vector, which takes the place of its only output token."""
    texts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Token ids of real texts in the prompt, by name of the text."""

    @property
    def num_prompt(self) -> int:
        """The number of prompt tokens."""
        return sum(span.length for span in self.prompt)

    def limit(self, max_tokens: int) -> int:
        """Returns the requested maximum of output tokens. ``max_tokens``: that of the workload."""
        if self.is_pooled:
            return 1
        own = self.num_output if self.max_tokens == OWN else self.max_tokens
        return max_tokens if own is None else own

    def request(self, max_tokens: int, *, tell_length: bool = False) -> AddRequest:
        """Returns the job as a request. ``max_tokens``: limit of output tokens if the job sets
        none; ``tell_length``: the request's hints include its output length."""
        max_tokens = self.limit(max_tokens)
        return AddRequest(
            self.request_id,
            self.tokens(),
            _params(max_tokens),
            seed=0,
            arrival_time=self.arrival,
            max_tokens=max_tokens,
            eos_token_ids=[END],
            priority=self.priority,
            user=self.user,
            deadline=None if self.deadline is None else self.arrival + self.deadline,
            hints=self.hints_for(tell_length) or None,
            adapter=self.adapter or None,
            tbt=self.tbt,
            pooling=PoolingParams() if self.is_pooled else None,
        )

    def tokens(self, answers: Mapping[str, Sequence[int]] | None = None) -> list[int]:
        """Returns the prompt's token ids. ``answers``: generated tokens by request id, which the
        prompt may repeat; ``None``: they are filler tokens, as in a simulation."""
        return tokens_of(self.prompt, answers, self.texts)

    def hints_for(self, tell_length: bool = False) -> dict[str, Any]:
        """Returns the request's hints for policies, including its promises, program and tier; with
        ``tell_length`` also its output length."""
        hints: dict[str, Any] = {}
        if self.ttft is not None:
            hints["ttft"] = self.ttft
        if self.tbt is not None:
            hints["tbt"] = self.tbt
        if self.program:
            hints["program"] = self.program
        if self.tier:
            hints["tier"] = self.tier
        hints.update(self.hints)
        if tell_length:
            hints["output_tokens"] = self.num_output
        return hints


@lru_cache
def _params(max_tokens: int) -> SamplingParams:
    """Returns sampling parameters with this maximum of output tokens. All requests with the same
    maximum share one object, since its validation takes as long as a step."""
    return SamplingParams(max_tokens=max_tokens)


def tokens_of(
    prompt: Iterable[Span],
    answers: Mapping[str, Sequence[int]] | None = None,
    texts: Mapping[str, Sequence[int]] = NOTHING,
) -> list[int]:
    """Returns the token ids of these spans, one after the other. ``answers``: generated tokens by
    request id; filler tokens replace missing ones. ``texts``: token ids of real texts, by name."""
    tokens: list[int] = []
    for text, length, start in prompt:
        if text in texts:
            tokens += texts[text][start : start + length]
        elif not text.startswith(ANSWER):
            tokens += _read(text, start, length)
        elif answers is None:
            tokens += [FILLER] * length
        else:
            found = list(answers.get(text.removeprefix(ANSWER), ()))[start : start + length]
            tokens += found + [FILLER] * (length - len(found))
    return tokens


def _read(text: str, start: int, length: int) -> list[int]:
    """Returns ``length`` tokens of a made-up text, from position ``start`` on."""
    # All texts are read from one table, each from another place; their first tokens are replaced so
    # that no two texts begin alike.
    key = int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "little")
    table = _table()
    first = (key + start) % TABLE_LENGTH
    part = table[first : first + length]
    while len(part) < length:  # longer than what is left of the table
        part += table[: length - len(part)]
    for place in range(start, min(NUM_OWN, start + length)):
        part[place - start] = FIRST_TOKEN + (key >> (20 + 16 * place)) % NUM_WORDS
    return part


@lru_cache(maxsize=1)
def _table() -> list[int]:
    """Returns the table of random token ids from which made-up texts are read."""
    # Equal ids share one int object, and slices are quick copies.
    rng = np.random.Generator(np.random.PCG64(20261125))
    numbers = list(range(VOCABULARY))
    drawn: list[int] = rng.integers(FIRST_TOKEN, VOCABULARY, TABLE_LENGTH).tolist()
    return [numbers[number] for number in drawn]


Follow = Callable[[Job, float], Iterable[Job]]
"""Called with a job and the time of its end; returns the jobs that follow it."""
