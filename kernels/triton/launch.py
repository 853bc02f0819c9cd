"""A kernel with everything its launch needs, so that it can be run, or only compiled."""

from __future__ import annotations

from typing import Any, NamedTuple


class Launch(NamedTuple):
    """One launch: `run` it where its tensors lie, or `compile` it for a target that is not here."""

    kernel: Any
    grid: tuple[int, ...]
    args: dict[str, Any]
    num_warps: int
    num_stages: int

    def run(self) -> None:
        self.kernel[self.grid](**self.args, num_warps=self.num_warps, num_stages=self.num_stages)

    def compile(self) -> Any:
        """The compiled kernel, specialised by the very path that a launch takes."""
        return self.kernel.warmup(
            **self.args, grid=self.grid, num_warps=self.num_warps, num_stages=self.num_stages
        )
