"""A cell of the kill matrix, and what came of it."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Cell:
    """What happens to whom, when."""

    target: str
    fault: str
    phase: str

    def __str__(self) -> str:
        return f"{self.target}/{self.fault}/{self.phase}"


@dataclass
class Outcome:
    """How long others took to react, and what was wrong."""

    cell: Cell
    patience: float = 1.0  # by which limits are longer, on a machine that may be busy
    seconds: float | None = None
    failures: list[str] = field(default_factory=list)

    def check(self, is_so: object, failure: str) -> None:
        if not is_so and is_so != 0.0:
            self.failures.append(failure)

    def within(self, seconds: float | None, limit: float, what: str) -> None:
        """``seconds``: how long something took, ``None`` if it never came."""
        if seconds is not None:
            self.seconds = round(max(seconds, self.seconds or 0.0), 3)
        limit *= self.patience
        if seconds is None or seconds > limit:
            self.failures.append(f"{what} took {seconds or 'too many'} s, the limit is {limit}")

    def __str__(self) -> str:
        took = "-" if self.seconds is None else f"{self.seconds:.3f} s"
        return f"{self.cell!s:32} {took:>9}  {'; '.join(self.failures) or 'right'}"
