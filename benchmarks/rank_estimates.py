"""Estimates step times of Llama-70B on eight H100, by how it is divided among them.

    python benchmarks/rank_estimates.py

Nothing is measured: times follow from data sheets (`policylab/sim/datasheet.py`, `ranks.py`). A
decode step is the time from a token of a sequence to its next one, with each sequence at a context
of 4,096 tokens. With two stages, half of the sequences is in each. The prompt of 8,192 tokens is
computed in chunks of 2,048, which follow each other through the stages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from figures import print_table

from engine.sched.predict.cost import StepShape
from engine.sched.predict.profile import Profile
from policylab.sim.datasheet import BYTES, DEVICES, MODELS, Sizes, estimate
from policylab.sim.ranks import Link, cycle, last_end

MODEL, DEVICE = Sizes.of(MODELS["llama-70b"]), DEVICES["h100"]
NETWORK = Link(50e9, 20e-6)  # between two machines
MEMORY, UTILIZATION, ACTIVATIONS = 80e9, 0.9, 3e9  # bytes of a device; the share used; kept free
CONTEXT, PROMPT, CHUNK = 4096, 8192, 2048
ROWS = (1, 32, 256)


@dataclass(frozen=True)
class Layout:
    """How the model is divided."""

    name: str
    num_ranks: int
    """Ranks of a stage."""
    num_stages: int
    link: Link
    """Between the ranks of a stage."""
    between: Link
    """Between stages."""

    def stages(self) -> list[Sizes]:
        """The sizes of each stage: equally many layers, the last one with the output layer."""
        each = len(MODEL.windows) // self.num_stages
        inner = replace(MODEL, output=0, windows=MODEL.windows[:each])
        return [inner] * (self.num_stages - 1) + [replace(inner, output=MODEL.output)]

    def profiles(self) -> list[Profile]:
        return [estimate(self.name, s, DEVICE, self.num_ranks, self.link) for s in self.stages()]

    def weights(self) -> float:
        """Bytes of weights of a device, where they are most."""
        stages = self.stages()
        counts = [len(each.windows) * each.layer + each.output for each in stages]
        counts[0] += MODEL.output  # the embedding, of the same size
        return BYTES * max(counts) / self.num_ranks

    def kv_tokens(self) -> int:
        """Tokens whose keys and values fit."""
        left = UTILIZATION * MEMORY - ACTIVATIONS - self.weights()
        return int(left / (len(self.stages()[0].windows) * MODEL.kv_bytes(self.num_ranks)))

    def times(self, shapes: Sequence[StepShape]) -> list[list[float]]:
        """Seconds of micro-batches in each stage, with the hand-over to the next one."""
        profiles = self.profiles()
        found = [[profile.seconds(shape) for profile in profiles] for shape in shapes]
        for shape, stages in zip(shapes, found, strict=True):
            for stage in range(self.num_stages - 1):
                stages[stage] += self.between.hand_over(BYTES * MODEL.hidden * shape.num_tokens)
        return found

    def decode(self, num_rows: int) -> float:
        """Seconds from a token to the next one of the same sequence."""
        num_batches = min(self.num_stages, num_rows)
        rows = [num_rows // num_batches] * num_batches
        shapes = [StepShape(n, n, n, n * CONTEXT, n * (CONTEXT + 1), 0.0) for n in rows]
        return cycle(self.times(shapes))

    def prompt(self) -> float:
        """Seconds until the first token."""
        pairs = CHUNK * (CHUNK + 1) // 2
        starts = range(0, PROMPT, CHUNK)
        shapes = [StepShape(1, CHUNK, 0, start, CHUNK * start + pairs, 0.0) for start in starts]
        return last_end(self.times(shapes))


LAYOUTS = [
    Layout("one host: TP 8", 8, 1, DEVICE.link, DEVICE.link),
    Layout("one host: PP 2 x TP 4", 4, 2, DEVICE.link, DEVICE.link),
    Layout("two hosts: PP 2 between, TP 4 in each", 4, 2, DEVICE.link, NETWORK),
    Layout("two hosts: TP 8 across both", 8, 1, NETWORK, NETWORK),
]


def main() -> None:
    rows = [
        [
            layout.name,
            f"{layout.weights() / 1e9:.1f}",
            f"{layout.kv_tokens() / 1e6:.2f}",
            *(f"{1e3 * layout.decode(num):.1f}" for num in ROWS),
            f"{1e3 * layout.prompt():.0f}",
        ]
        for layout in LAYOUTS
    ]
    head = ("layout", "weights GB", "KV M tokens", *(f"{num} rows ms" for num in ROWS), "prompt ms")
    print_table("Estimate (not measured): Llama-70B, bfloat16, eight H100", head, rows)


if __name__ == "__main__":
    main()
