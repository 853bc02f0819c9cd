"""A workload of two users, one of whom floods the engine with requests."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from engine.errors import ConfigError
from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import Lengths, find_lengths
from policylab.sim.workloads.open_loop import Body, OpenLoop, pairs, uniform


@dataclass(frozen=True, kw_only=True)
class TwoUsers(OpenLoop):
    """Two users, ``calm`` and ``flood``, with requests of the same lengths; the user ``flood``
    sends ``self.flood`` times as many as ``calm``.

    Under overload a fair policy serves both users equally, if both send enough."""

    kind: ClassVar[str] = "two-users"

    flood: float = 9.0
    """How many times as many requests the user ``flood`` sends as ``calm``."""
    lengths: str = "log-uniform(prompt=(16, 512), output=(8, 256))"
    """Lengths: ``log-uniform(...)``, ``fixed(prompt=256, output=64)`` or the name of a trace."""

    def __post_init__(self) -> None:
        OpenLoop.__post_init__(self)
        self.check("flood", self.flood, 0.0, 1e6)
        if self.users or self.num_users:
            raise ConfigError(
                "two-users has users of its own: leave users and num_users out, or use another "
                "workload, as in log-uniform(users='a(share=9),b')"
            )
        self._lengths  # noqa: B018 - it checks the option

    @cached_property
    def _lengths(self) -> Lengths:
        return find_lengths(self.lengths)

    @property
    def max_prompt(self) -> int:
        return self._lengths.prompt.longest

    @property
    def max_output(self) -> int:
        return self._lengths.output.longest

    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        is_calm = 1.0 / (1.0 + self.flood)
        whose = uniform(dice.stream("whose"))
        for number, (num_prompt, num_output) in enumerate(pairs(self._lengths, dice)):
            user = {"user": "calm" if next(whose) < is_calm else "flood"}
            yield Body((Span(f"prompt {number}", num_prompt),), num_output, user)
