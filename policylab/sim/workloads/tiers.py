"""A workload of chats with latency limits, mixed with batch work."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from policylab.sim.job import Span
from policylab.sim.workloads.draws import RandomDraws
from policylab.sim.workloads.lengths import Lengths, bounds
from policylab.sim.workloads.open_loop import Body, OpenLoop, pairs, uniform


@dataclass(frozen=True, kw_only=True)
class Tiers(OpenLoop):
    """Short chats with limits on TTFT and time between tokens, mixed with long batch requests. All
    chats have one user, all batch requests another. A chat's deadline follows from its limits and
    length. Batch requests have priority 1 and the hint ``offline``."""

    kind: ClassVar[str] = "tiers"

    chat_share: float = 0.7
    """Share of chats among the requests."""
    chat_prompt: tuple[int, int] = (16, 512)
    """The shortest and the longest prompt of a chat, in tokens; like all lengths here, log-uniform
    in between."""
    chat_output: tuple[int, int] = (16, 256)
    batch_prompt: tuple[int, int] = (256, 2048)
    batch_output: tuple[int, int] = (64, 512)
    ttft: float = 1.0
    """Promised seconds to the first token of a chat."""
    tbt: float = 0.1
    """Promised seconds between two tokens of a chat."""
    batch_deadline: float = 120.0
    """Seconds after arrival by which batch work should end."""

    def __post_init__(self) -> None:
        OpenLoop.__post_init__(self)
        self.check("chat_share", self.chat_share, 0.0, 1.0)
        for name in ("ttft", "tbt", "batch_deadline"):
            self.check(name, getattr(self, name), 1e-6, 1e6)
        self._lengths  # noqa: B018 - it checks the options

    @cached_property
    def _lengths(self) -> tuple[Lengths, Lengths]:
        """The length distributions of chats and of batch requests."""
        chat, batch = (
            Lengths(*(bounds(name, getattr(self, name)) for name in names))
            for names in (("chat_prompt", "chat_output"), ("batch_prompt", "batch_output"))
        )
        return chat, batch

    @property
    def max_prompt(self) -> int:
        return max(lengths.prompt.longest for lengths in self._lengths)

    @property
    def max_output(self) -> int:
        return max(lengths.output.longest for lengths in self._lengths)

    def bodies(self, dice: RandomDraws) -> Iterator[Body]:
        chats, batches = (
            pairs(lengths, dice, f" of {name}")
            for name, lengths in zip(("chat", "batch"), self._lengths, strict=True)
        )
        promise = {"tier": "chat", "user": "chat", "ttft": self.ttft, "tbt": self.tbt}
        batch = {
            "tier": "batch",
            "user": "batch",
            "priority": 1,
            "deadline": self.batch_deadline,
            "hints": {"offline": True},
        }
        for number, share in enumerate(uniform(dice.stream("tier"))):
            is_chat = share < self.chat_share
            num_prompt, num_output = next(chats if is_chat else batches)
            prompt = (Span(f"prompt {number}", num_prompt),)
            due = self.ttft + self.tbt * (num_output - 1)
            yield Body(prompt, num_output, {**promise, "deadline": due} if is_chat else batch)
