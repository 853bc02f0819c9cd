"""Independent requests with log-uniform lengths."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import Lengths, bounds
from policylab.sim.workloads.open_loop import Body, OpenLoop, pairs, uniform

NUM_PREFIXES = 8


@dataclass(frozen=True, kw_only=True)
class LogUniform(OpenLoop):
    """Requests with log-uniform lengths of prompt and output, optionally with shared prefixes."""

    kind: ClassVar[str] = "log-uniform"

    prompt_tokens: tuple[int, int] = (16, 1024)
    """The shortest and the longest prompt, without a shared prefix, in tokens."""
    output_tokens: tuple[int, int] = (8, 512)
    """The shortest and the longest output, in tokens."""
    shared_prefix: int = 0
    """Half of the prompts start with a shared prefix of this many tokens, which is one of eight
    texts; 0: none does."""
    num_users: int = 4

    def __post_init__(self) -> None:
        OpenLoop.__post_init__(self)
        self.check("shared_prefix", self.shared_prefix, 0)
        self.lengths  # noqa: B018 - it checks the options

    @property
    def lengths(self) -> Lengths:
        """The length distributions of prompts, without shared prefixes, and of outputs."""
        return Lengths(
            bounds("prompt_tokens", self.prompt_tokens),
            bounds("output_tokens", self.output_tokens),
        )

    @property
    def max_prompt(self) -> int:
        return self.shared_prefix + self.prompt_tokens[1]

    @property
    def max_output(self) -> int:
        return self.output_tokens[1]

    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        prefixes = uniform(dice.stream("prefixes"))
        for number, (num_prompt, num_output) in enumerate(pairs(self.lengths, dice)):
            own = Span(f"prompt {number}", num_prompt)
            place = int(next(prefixes) * 2 * NUM_PREFIXES)
            if self.shared_prefix and place < NUM_PREFIXES:
                yield Body((Span(f"prefix {place}", self.shared_prefix), own), num_output)
            else:
                yield Body((own,), num_output)
