"""From logits to tokens on the device; the host learns later what they are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.messages.outputs import TokenLogprobs
from engine.messages.step import Column, NewSeq
from engine.sample.logprobs import WHOLE_VOCABULARY
from engine.sample.processors import (
    LogitsProcessorFactory,
    NamedProcessor,
    ProcessorError,
)
from engine.worker.cuda.edits import EditTables
from engine.worker.cuda.penalties import PenaltyTables
from engine.worker.cuda.platform import Platform
from engine.worker.cuda.slots import Slots
from engine.worker.states import LiveSeqs
from kernels import slots as on_slots
from kernels.slots import Rows


class Draws(NamedTuple):
    """The rows of logits of a step, as the host knows them: [R] each."""

    rows: Column  # of the plan
    slots: Column  # -1: padding, or nobody wants a token behind this row
    positions: Column  # where the token will stand


class RawRows(NamedTuple):
    """Logits as the model gave them, of rows that all want equally many log-probabilities."""

    num: int  # of the most likely tokens
    rows: list[int]  # of the draws
    places: torch.Tensor  # the same on the device
    logits: torch.Tensor


class Drawing(NamedTuple):
    """What is left to do with a step's rows once their tokens are chosen."""

    errors: dict[int, str]  # by row of the draws
    sound: torch.Tensor | None  # [R] bool: were they finite before they were edited
    seats: torch.Tensor | None  # [R] of the penalties
    raw: list[RawRows]


PLAIN = Drawing({}, None, None, [])


class Scores(NamedTuple):
    """Log-probabilities of some draws: token ids and values [r, 1 + num], ranks [r]."""

    rows: list[int]
    ids: torch.Tensor
    logprobs: torch.Tensor
    ranks: torch.Tensor


class DeviceSampler:
    """Edits logits in the same order as `engine.sample.sampler.Sampler`, then draws.

    The draw itself reads the slots' columns alone, so that it can be part of a graph.
    """

    def __init__(
        self,
        platform: Platform,
        slots: Slots,
        live: LiveSeqs,
        vocab_size: int,
        factories: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        self._platform = platform
        self._slots = slots
        self._live = live
        self._factories = tuple(factories)
        self._edits = EditTables(platform, len(live.tokens), vocab_size)
        self._penalties = PenaltyTables(platform, vocab_size)
        self._processors: dict[int, list[NamedProcessor]] = {}
        self._edited: set[int] = set()  # slots that are in any of the three
        self._num_logprobs: dict[int, int] = {}

    def add(self, seq: NewSeq) -> None:
        """Take over a slot for a new or resumed sequence."""
        self.remove(seq.slot)
        self._edits.add(seq)
        self._penalties.add(seq)
        named = [NamedProcessor(factory, seq) for factory in self._factories]
        if processors := [processor for processor in named if processor.is_wanted]:
            self._processors[seq.slot] = processors
        if self._is_edited(seq.slot):
            self._edited.add(seq.slot)
        if seq.params.logprobs is not None:
            self._num_logprobs[seq.slot] = seq.params.logprobs
        output = seq.token_ids[seq.num_prompt :]
        if output and (self._edits.has_words(seq.slot) or seq.slot in self._processors):
            tokens = self._platform.upload(np.array(output, dtype=np.int32))
            self._slots.remember(seq.slot, seq.num_prompt, tokens)

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot, if there is one."""
        self._edits.remove(slot)
        self._penalties.remove(slot)
        self._processors.pop(slot, None)
        self._edited.discard(slot)
        self._num_logprobs.pop(slot, None)

    def prepare(self, rows: Rows, draws: Draws) -> Drawing:
        """Everything between the model and the draw; changes logits in place."""
        if not (self._edited or self._num_logprobs):
            return PLAIN
        slots = draws.slots.tolist()
        raw = self._copy_raw(rows.logits, slots)
        if self._edited.isdisjoint(slots):
            return PLAIN._replace(raw=raw)
        sound = torch.isfinite(rows.logits.amax(dim=1))
        table = self._slots
        self._edits.apply(rows, draws.slots, table.history, table.num_prompt)
        seats = self._penalties.seats(draws.slots)
        if seats is not None:
            self._penalties.apply(rows, seats)
        errors = self._process(rows.logits, draws)
        # A mask would hide what is wrong with the model.
        rows.logits[:, 0].masked_fill_(~sound, torch.nan)
        return Drawing(errors, sound, seats, raw)

    def draw(self, rows: Rows) -> torch.Tensor:
        """One token for each row [R] int32, -1 where there is none."""
        return on_slots.sample(rows, self._slots.asked)

    def finish(self, drawing: Drawing, chosen: torch.Tensor) -> list[Scores]:
        """Count what was chosen; log-probabilities for those who want them."""
        if drawing.seats is not None:
            self._penalties.count(drawing.seats, chosen)
        return [_scores(raw, chosen) for raw in drawing.raw]

    def _is_edited(self, slot: int) -> bool:
        return self._edits.has(slot) or self._penalties.has(slot) or slot in self._processors

    def _copy_raw(self, logits: torch.Tensor, slots: list[int]) -> list[RawRows]:
        if not self._num_logprobs:
            return []
        by_num: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot in self._num_logprobs:
                by_num.setdefault(self._num_logprobs[slot], []).append(row)
        raw = []
        for num, rows in by_num.items():
            places = self._platform.upload(np.array(rows))
            raw.append(RawRows(num, rows, places, logits[places]))
        return raw

    def _process(self, logits: torch.Tensor, draws: Draws) -> dict[int, str]:
        """Run custom processors. They see output tokens, for which the host waits."""
        errors: dict[int, str] = {}
        if not self._processors:
            return errors
        for row, (slot, position) in enumerate(
            zip(draws.slots.tolist(), draws.positions.tolist(), strict=True)
        ):
            if slot not in self._processors:
                continue
            tokens = self._live.tokens[slot, :position].copy()
            begin = self._live.seqs[slot].num_prompt
            tokens[begin:] = self._slots.history[slot, begin:position].cpu().numpy()
            try:
                for process in self._processors[slot]:
                    process(logits[row], tokens)
            except ProcessorError as error:
                errors[row] = str(error)
        return errors


def _scores(raw: RawRows, chosen: torch.Tensor) -> Scores:
    vocab_size = raw.logits.shape[1]
    num = vocab_size if raw.num == WHOLE_VOCABULARY else min(raw.num, vocab_size)
    ids = chosen[raw.places].clamp(min=0).long()[:, None]
    if num:
        ids = torch.cat((ids, raw.logits.topk(num, dim=1).indices), dim=1)
    logprobs, ranks = on_slots.token_logprobs(raw.logits, ids)
    return Scores(raw.rows, ids, logprobs, ranks)


def entries_of(rows: list[int], columns: Sequence[torch.Tensor]) -> dict[int, TokenLogprobs]:
    """Log-probabilities by row of the draws, from what `Scores` came home as."""
    ids, logprobs, ranks = (column.tolist() for column in columns)
    entries = zip(rows, ids, logprobs, ranks, strict=True)
    return {row: TokenLogprobs(*entry) for row, *entry in entries}
