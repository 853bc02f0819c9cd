"""Where the ranks of a pipeline meet: which rank is which, and what connects them.

    rank = stage * ranks of a stage + number in the stage

    stage 0                 stage 1
    rank 0 ── hidden states ──> rank 2 ── results ──> rank 0
      │ collectives               │
    rank 1 ── hidden states ──> rank 3

The ranks of a stage compute each layer together, so each of them has the hidden states of all, and
sends them to one rank of the next stage. Results come from the first rank of the last stage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from engine.parallel.channel import ChannelMemory, Ends, Handle, Receiver, Sender, Shape
from engine.parallel.meeting import Meeting, Place, Stoppable

RESULT_BYTES, NUM_RESULTS = 1 << 16, 16  # larger results are sent in pieces


class Links:
    """What connects a rank with others. Members are ``None`` where there is nobody."""

    def __init__(
        self,
        collectives: Stoppable | None,
        entering: Receiver | None,
        leaving: Sender | None,
        results: Sender | None,
    ) -> None:
        self.collectives = collectives
        """The operations of the ranks of the stage."""
        self.entering = entering
        """Hidden states of the stage before."""
        self.leaving = leaving
        """Hidden states for the next stage."""
        self.results = results
        """Results for rank 0, from the first rank of the last stage."""

    def limit(self, wait_seconds: float) -> None:
        """Set how long this rank waits for another one of its stage."""
        if self.collectives is not None:
            self.collectives.limit(wait_seconds)

    def close(self) -> None:
        """Let go of the memory that the ranks share. May be repeated."""
        if self.collectives is not None:
            self.collectives.close()
        for end in (self.entering, self.leaving, self.results):
            if end is not None:
                end.close()


@dataclass(frozen=True)
class Junction:
    """What a rank needs to meet the others of a pipeline; it can be sent to its process.

    places: of each stage, for its collectives; (): a stage has one rank. hidden: of each stage but
    the last, for each of its ranks. spins: whether all threads of the ranks can run at once."""

    num_stages: int
    stage_size: int
    places: tuple[Place, ...]
    hidden: tuple[tuple[Handle, ...], ...]
    results: Handle
    spins: bool

    def open(self, rank: int) -> Links:
        """What connects a rank with others."""
        stage, number = divmod(rank, self.stage_size)
        last, before, after = self.num_stages - 1, rank - self.stage_size, rank + self.stage_size
        leaving, results, entering = None, None, None
        if stage < last:
            leaving = Sender(self.hidden[stage][number], Ends(rank, after, self.spins))
        elif number == 0:
            results = Sender(self.results, Ends(rank, 0, self.spins))
        if stage > 0:
            entering = Receiver(self.hidden[stage - 1][number], Ends(before, rank, self.spins))
        collectives = self.places[stage].open(number) if self.places else None
        return Links(collectives, entering, leaving, results)

    def open_results(self) -> Receiver:
        """The results of the last stage, for rank 0."""
        sender = (self.num_stages - 1) * self.stage_size
        return Receiver(self.results, Ends(sender, 0, self.spins))


class StagesMeeting:
    """Keeps the memory that the ranks of a pipeline share. ``junction``: for each of them.

    Raises ``OSError`` if processes cannot share memory on this system."""

    def __init__(
        self,
        num_stages: int,
        meetings: Sequence[Meeting],
        *,
        shape: Shape,
        stage_size: int,
        spins: bool,
    ) -> None:
        """meetings: of each stage, which are closed with this; shape: of channels of hidden
        states."""
        self._meetings = meetings
        self._kept: list[ChannelMemory] = []
        try:
            hidden = tuple(
                tuple(self._channel(shape) for _ in range(stage_size))
                for _ in range(num_stages - 1)
            )
            results = self._channel(Shape(NUM_RESULTS, RESULT_BYTES))
        except BaseException:
            self.close()
            raise
        places = tuple(
            replace(meeting.place, first=stage * stage_size)
            for stage, meeting in enumerate(meetings)
        )
        self.junction = Junction(num_stages, stage_size, places, hidden, results, spins)

    def stop(self) -> None:
        """End the waits of stages for each other. Any thread may call it."""
        for memory in self._kept:
            memory.stop()

    def is_waiting(self, rank: int) -> bool:
        """Whether a rank waits for the hidden states of the stage before."""
        index = rank - self.junction.stage_size  # channels are in the order of their receivers
        return index >= 0 and self._kept[index].is_awaited

    def close(self) -> None:
        """Let go of the memory. Ranks that have opened it keep it. May be repeated."""
        for memory in self._kept:
            memory.close()
        for meeting in self._meetings:
            meeting.close()

    def _channel(self, shape: Shape) -> Handle:
        memory = ChannelMemory(shape)
        self._kept.append(memory)
        return memory.opened
