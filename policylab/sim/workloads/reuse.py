"""Prefix reuse: the share of prompt tokens that a prefix cache of unlimited size would hit."""

from __future__ import annotations

from hashlib import blake2b

from policylab.sim.job import Job, Span


class PrefixReuse:
    """Counts how many leading tokens of each prompt were also the beginning of an earlier prompt.

    Texts are compared by name. An answer counts as seen only once a later prompt contains it."""

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self.num_tokens = 0
        """Tokens of all prompts."""
        self.num_found = 0
        """Tokens that an unlimited cache would have found."""
        self._longest: dict[int, int] = {}  # by hash of the preceding spans and of the text

    @property
    def share(self) -> float:
        """The share (0 to 1) of prompt tokens that the unlimited prefix cache would hit."""
        return self.num_found / self.num_tokens if self.num_tokens else 0.0

    def add(self, job: Job) -> int:
        """Record a job's prompt. Returns how many of its leading tokens (a multiple of the block
        size) are the beginning of an earlier prompt."""
        common, is_known, before = 0, True, 0
        for text, length, start in merged(_parts(job, self.block_size)):
            key = hash((before, text, start))
            known = self._longest.get(key, 0)
            if is_known:
                common += min(known, length)
                is_known = length <= known
            if length > known:
                self._longest[key] = length
            before = hash((key, length))
        found = common // self.block_size * self.block_size
        self.num_tokens += job.num_prompt
        self.num_found += found
        return found


def _parts(job: Job, block_size: int) -> tuple[Span, ...]:
    """The spans of a job's prompt. If its token ids are known, each block of tokens is one span,
    named by a hash of the tokens."""
    if not job.texts:
        return job.prompt
    tokens = job.tokens()
    blocks = (tokens[at : at + block_size] for at in range(0, len(tokens), block_size))
    return tuple(Span(blake2b(repr(block).encode()).hexdigest(), len(block)) for block in blocks)


def merged(prompt: tuple[Span, ...]) -> list[Span]:
    """The spans of a prompt, with adjacent spans of the same text joined."""
    found: list[Span] = []
    for span in prompt:
        last = found[-1] if found else None
        if last is not None and last.text == span.text and last.start + last.length == span.start:
            found[-1] = Span(span.text, last.length + span.length, last.start)
        elif span.length:
            found.append(span)
    return found
