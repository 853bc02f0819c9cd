"""A request that will come: when, what it says, and how long it will turn out to be."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import blake2b
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from engine.messages.params import SamplingParams
from engine.messages.requests import AddRequest

END = 0  # the token that ends a text; prompts and outputs are made of others
FILLER = 1  # every token that a simulated worker generates but the last
FIRST_TOKEN = 2
VOCABULARY = 50_000

ANSWER = "answer:"
"""Begins the name of the text that is what a request generated: ``answer:`` and its id."""

NOTHING: Mapping[str, Any] = MappingProxyType({})

TABLE_LENGTH = 1 << 20  # numbers drawn once, of which every text shows a part
NUM_OWN = 2  # tokens at the beginning of a text that are its own
NUM_WORDS = VOCABULARY - FIRST_TOKEN


class Span(NamedTuple):
    """``length`` tokens of a text from ``start`` on. The same name is the same text."""

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
    """Tokens it will generate, the one that ends it included. No policy knows it, but an
    oracle."""
    user: str = ""
    priority: int = 0
    deadline: float | None = None
    """A wish: seconds after its arrival by which it should have ended."""
    ttft: float | None = None
    """Promised seconds from arrival to first token."""
    tbt: float | None = None
    """Promised seconds between two tokens."""
    tier: str = ""
    program: str = ""
    """The conversation or agent that it is a part of."""
    hints: Mapping[str, Any] = field(default_factory=dict)
    """Further ones for policies, next to those that ``hints_for`` gives."""
    max_tokens: int | None = None
    """What it asks for; ``None``: what all requests of the workload do."""
    texts: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Token ids of those texts of its prompt that were not made up, by name."""

    @property
    def num_prompt(self) -> int:
        """Tokens of its prompt."""
        return sum(span.length for span in self.prompt)

    def request(self, max_tokens: int, *, tell_length: bool = False) -> AddRequest:
        """What the scheduler sees where answers are simulated. ``max_tokens``: what it asks for,
        unless the job says that itself."""
        max_tokens = self.max_tokens or max_tokens
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
            tbt=self.tbt,
        )

    def tokens(self, answers: Mapping[str, Sequence[int]] | None = None) -> list[int]:
        """The token ids of its prompt. ``answers``: tokens that requests generated, by id, where
        they were not simulated."""
        return tokens_of(self.prompt, answers, self.texts)

    def hints_for(self, tell_length: bool = False) -> dict[str, Any]:
        """Hints for policies: promises, program and tier among them, where it has any."""
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
    """What all requests that ask for this many tokens share: to check it takes as long as a
    step."""
    return SamplingParams(max_tokens=max_tokens)


def tokens_of(
    prompt: Iterable[Span],
    answers: Mapping[str, Sequence[int]] | None = None,
    texts: Mapping[str, Sequence[int]] = NOTHING,
) -> list[int]:
    """The token ids of these parts of texts, one after the other; ``texts`` are those that were
    not made up. What an answer lacks, as that of a request that was refused, is filled up."""
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
    """Texts are one table, each read from a place of its own; their first tokens tell those apart
    that happen to have the same."""
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
    """Numbers as Python has them: the same object for the same number, and a part is a quick
    copy."""
    rng = np.random.Generator(np.random.PCG64(20261125))
    numbers = list(range(VOCABULARY))
    drawn: list[int] = rng.integers(FIRST_TOKEN, VOCABULARY, TABLE_LENGTH).tolist()
    return [numbers[number] for number in drawn]


Follow = Callable[[Job, float], Iterable[Job]]
"""Which jobs come since this one has ended at this time."""
