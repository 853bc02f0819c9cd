"""Sampler: from the logits of a step to its tokens, which the host reads later.

    prepare   log-probabilities want the logits as they came; masks, edits, penalties, processors
    draw      temperature, min-p, top-k, top-p, noise: of the slots' columns alone, so it may be
              part of a graph
    finish    penalties count what stands; log-probabilities of it

The noise depends on the request's seed and the token's position only: from the same logits a seeded
request draws the same tokens in any batch, row or chunking, with drafts and without, and after any
preemption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from engine.messages.step import Column, NewSeq
from engine.sample.edits import EditTables, PenaltyTables, SamplingSpec, Upload
from engine.sample.logprobs import Scored, score
from engine.sample.processors import LogitsProcessorFactory, NamedProcessor, ProcessorError
from kernels import slots as on_slots
from kernels.slots import Columns, Rows


class DraftRows(NamedTuple):
    """Drafts by row of the draws. Row j of a sequence comes after its first j drafts."""

    judged: Column  # [R]: the draft where the row's token will stand, -1: none
    before: NDArray[np.int32]  # [R, K]: the drafts of its sequence before that, -1: none


class RowMasks(NamedTuple):
    """Allowed tokens of rows of the draws, on the device."""

    words: torch.Tensor  # [M, words of 32 tokens] int32
    of_row: Column  # [R]: the mask of each row, -1: none


class Draws(NamedTuple):
    """The rows of logits of a step, as the host knows them: R in all."""

    rows: Column  # [R], of the plan
    slots: Column  # [R], -1: padding, or no token is wanted after this row
    positions: Column  # [R]: where the token will stand
    drafts: DraftRows | None = None
    is_padded: bool = False  # some rows may be padding


class RawRows(NamedTuple):
    """Logits as the model gave them, of rows that all want equally many log-probabilities."""

    num: int  # of the most likely tokens
    rows: list[int]  # of the draws
    places: torch.Tensor  # the same on the device
    logits: torch.Tensor


class Drawing(NamedTuple):
    """Work left for a step's rows once their tokens are drawn."""

    errors: dict[int, str]  # by row of the draws, if no token is drawn there
    edited: list[int]  # rows whose logits were changed
    checked: list[int]  # those of them that were looked at before
    sound: torch.Tensor | None  # of these [E] bool: were they finite
    seats: torch.Tensor | None  # [R] of the penalties
    raw: list[RawRows]
    barred: set[int]  # rows with an error whose own parameters mask all tokens
    masks: RowMasks | None = None  # that the draw is to lay on rows, as nothing else edits them


class RowScores(NamedTuple):
    """Log-probabilities of some rows of the draws."""

    rows: list[int]
    scored: Scored


class SlotTables(NamedTuple):
    """Columns that the sampler reads by slot, on the device."""

    requested: Columns  # by the sequence in it, for the draw
    history: torch.Tensor  # [slots, max_len] int32: output tokens by position
    num_prompt: torch.Tensor  # [slots] int32


class Sampler:
    """Edits the rows of requests that ask for something, and draws for all.

    Rows whose logits are not finite, that have no token left, or whose custom processor fails are
    reported with the reason; the other rows of the batch are not affected.
    """

    def __init__(
        self,
        upload: Upload,
        tables: SlotTables,
        vocab_size: int,
        factories: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        self._upload = upload
        self._tables = tables
        self._factories = tuple(factories)
        self._edits = EditTables(upload, len(tables.num_prompt), vocab_size)
        self._penalties = PenaltyTables(upload, vocab_size)
        self._processors: dict[int, list[NamedProcessor]] = {}
        self._num_prompt: dict[int, int] = {}  # of slots with processors
        self._edited: set[int] = set()  # slots that are in any of the three
        self._num_logprobs: dict[int, int] = {}
        self._random: set[int] = set()  # slots whose tokens are drawn by chance
        self._narrowed: set[int] = set()  # slots that draw among a part of the tokens

    @property
    def wants_largest_only(self) -> bool:
        """Whether all that is done with logits, of any slot, is to take the largest."""
        return not (self._random or self._edited or self._num_logprobs)

    def add(self, seq: NewSeq, spec: SamplingSpec) -> None:
        """Take over a slot for a new or resumed sequence; state of its last sequence is cleared."""
        slot = seq.slot
        self.remove(slot)
        self._edits.add(slot, spec)
        self._penalties.add(seq, spec)
        named = [NamedProcessor(factory, seq) for factory in self._factories]
        if processors := [processor for processor in named if processor.is_wanted]:
            self._processors[slot] = processors
            self._num_prompt[slot] = seq.num_prompt
        if self._edits.has(slot) or self._penalties.has(slot) or slot in self._processors:
            self._edited.add(slot)
        if spec.temperature != 0:
            self._random.add(slot)
        if spec.draws_among_some:
            self._narrowed.add(slot)
        if spec.num_logprobs is not None:
            self._num_logprobs[slot] = spec.num_logprobs
        output = seq.token_ids[seq.num_prompt :]
        if output and (self._edits.has_words(slot) or slot in self._processors):
            tokens = self._upload(np.array(output, dtype=np.int32))
            self._tables.history[slot, seq.num_prompt : len(seq.token_ids)] = tokens

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot, if there is one."""
        self._edits.remove(slot)
        self._penalties.remove(slot)
        self._processors.pop(slot, None)
        self._num_prompt.pop(slot, None)
        self._edited.discard(slot)
        self._num_logprobs.pop(slot, None)
        self._random.discard(slot)
        self._narrowed.discard(slot)

    def prepare(
        self,
        rows: Rows,
        draws: Draws,
        masks: RowMasks | None = None,
        *,
        may_leave_masks: bool = False,
    ) -> Drawing:
        """Everything between the model and the draw; changes logits [R, V] float32 in place.

        The drafts before a row must be in the history already. may_leave_masks: the draw takes
        ``Drawing.masks``, and the host can read the logits after it.
        """
        if not (self._edited or self._num_logprobs or masks):
            return Drawing({}, [], [], None, None, [], set())
        slots = draws.slots.tolist()
        raw = self._copy_raw(rows.logits, slots)
        edited = [row for row, slot in enumerate(slots) if slot in self._edited]
        if masks is not None:
            edited = sorted({*edited, *np.flatnonzero(masks.of_row >= 0).tolist()})
        if not edited:
            return Drawing({}, [], [], None, None, raw, set())
        # Looked at before the edits, which would hide NaN or infinity of the model. A mask that is
        # all that edits a row is better left to the draw, which looks at little else than what is
        # allowed: a pass over all logits to write it down, or to look at them, takes as long as a
        # draw.
        checked, late = edited, None
        if masks is not None and may_leave_masks:
            looked_at = self._edited | self._num_logprobs.keys()  # log-probabilities show NaN
            checked = [row for row in edited if slots[row] in looked_at]
            masks, late = _divided(masks, checked)
        sound, errors = None, {}
        if checked:
            places = self._upload(np.array(checked))
            sound = on_slots.are_sound(rows.logits, places)
            errors = self._unsound(rows.logits, draws, checked, sound)
        if masks is not None:
            on_slots.apply_bitmask(rows.logits, masks.words, self._upload(masks.of_row))
        history, num_prompt = self._tables.history, self._tables.num_prompt
        self._edits.apply(rows, draws.slots, history, num_prompt)
        seats = self._penalties.seats(draws.slots)
        if seats is not None:
            before = None if draws.drafts is None else self._upload(draws.drafts.before)
            self._penalties.apply(rows, seats, before)
        self._process(rows.logits, draws, errors)
        if sound is not None:
            first = rows.logits[places, 0]
            rows.logits[places, 0] = torch.where(sound, first, torch.nan)
        return Drawing(errors, edited, checked, sound, seats, raw, set(), late)

    def can_preview(self, slot: int) -> bool:
        """Whether a token that is drawn from the logits as they are is the one that is drawn among
        any part of the tokens that it belongs to."""
        return slot >= 0 and slot not in self._edited and slot not in self._narrowed

    def draw(self, rows: Rows, masks: RowMasks | None = None) -> torch.Tensor:
        """One token for each row [R] int32, -1 where there is none."""
        if masks is None:
            return on_slots.sample(rows, self._tables.requested)
        of_row = self._upload(masks.of_row)
        return on_slots.sample_allowed(rows, self._tables.requested, masks.words, of_row)

    def finish(
        self, rows: Rows, draws: Draws, drawing: Drawing, drawn: torch.Tensor
    ) -> list[RowScores]:
        """Count what stands of the tokens drawn [R] (negative: nothing); log-probabilities of it.

        Where the host can read the logits at once, errors are entered in ``drawing.errors``.
        """
        if drawn.is_cpu and np.count_nonzero((tokens := drawn.numpy()) < 0):
            self._explain(rows.logits, draws, drawing, tokens)
        if drawing.seats is not None:
            self._penalties.count(drawing.seats, drawn)
        return [
            RowScores(raw.rows, score(raw.logits, drawn[raw.places].clamp(min=0).long(), raw.num))
            for raw in drawing.raw
        ]

    # -- helpers

    def _copy_raw(self, logits: torch.Tensor, slots: list[int]) -> list[RawRows]:
        if not self._num_logprobs:
            return []
        by_num: dict[int, list[int]] = {}
        for row, slot in enumerate(slots):
            if slot in self._num_logprobs:
                by_num.setdefault(self._num_logprobs[slot], []).append(row)
        raw = []
        for num, rows in by_num.items():
            places = self._upload(np.array(rows))
            raw.append(RawRows(num, rows, places, logits[places]))
        return raw

    def _process(self, logits: torch.Tensor, draws: Draws, errors: dict[int, str]) -> None:
        """Run custom processors. They see output tokens, for which the host waits."""
        if not self._processors:
            return
        columns = zip(draws.slots.tolist(), draws.positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(columns):
            if slot not in self._processors or row in errors:
                continue
            output = self._tables.history[slot, self._num_prompt[slot] : position].tolist()
            try:
                for process in self._processors[slot]:
                    process(output, logits[row])
            except ProcessorError as error:
                errors[row] = str(error)
                logits[row, 0] = torch.nan  # no token is drawn: after drafts none may stand

    def _unsound(
        self, logits: torch.Tensor, draws: Draws, edited: list[int], sound: torch.Tensor
    ) -> dict[int, str]:
        """Errors of unsound rows, where the host can read the logits."""
        if not sound.is_cpu:
            return {}
        bad = [edited[place] for place in np.flatnonzero(~sound.numpy()).tolist()]
        return {row: why_unsound(int(draws.positions[row]), flaw(logits[row])) for row in bad}

    def _explain(self, logits: torch.Tensor, draws: Draws, drawing: Drawing, drawn: Column) -> None:
        silent = [
            row
            for row in np.flatnonzero(drawn == -1).tolist()
            if draws.slots[row] >= 0 and row not in drawing.errors
        ]
        if drawing.masks is not None:
            as_given = [row for row in silent if drawing.masks.of_row[row] >= 0]
            sound = on_slots.are_sound(logits, torch.tensor(as_given, dtype=torch.int64))
            drawing.errors.update(self._unsound(logits, draws, as_given, sound))
            on_slots.apply_bitmask(logits, drawing.masks.words, self._upload(drawing.masks.of_row))
        for row in silent:
            if row in drawing.errors:
                continue
            position = int(draws.positions[row])
            if row in drawing.edited and bool((logits[row] == -torch.inf).all()):
                drawing.errors[row] = why_none_left(position)
                drawing.barred.add(row)
            elif row in drawing.checked:
                drawing.errors[row] = (
                    f"after a logits processor the logits for position {position} "
                    f"{flaw(logits[row])}"
                )
            else:
                drawing.errors[row] = why_unsound(position, flaw(logits[row]))


def _divided(masks: RowMasks, rows: list[int]) -> tuple[RowMasks | None, RowMasks | None]:
    """The masks of these rows of the draws, and those of the others."""
    if not rows:
        return None, masks
    is_one = np.zeros(len(masks.of_row), dtype=bool)
    is_one[rows] = True
    parts = (
        masks._replace(of_row=np.where(part, masks.of_row, -1).astype(np.int32))
        for part in (is_one, ~is_one)
    )
    here, others = (part if (part.of_row >= 0).any() else None for part in parts)
    return here, others


def why_unsound(position: int, what: str = "hold NaN or +inf, or are all -inf") -> str:
    """Error text for logits of the model that are not finite."""
    return f"the model's logits for position {position} {what}"


def why_none_left(position: int) -> str:
    """Error text for logits that were sound before they were edited."""
    return (
        f"no token is left for position {position}: allowed_token_ids, bad_words, min_tokens, "
        "a grammar and logits processors mask all tokens"
    )


def flaw(logits: torch.Tensor) -> str:
    """Why no token can be drawn from logits [V]."""
    if bool(logits.isnan().any()):
        return "hold NaN"
    return "hold +inf" if bool((logits == torch.inf).any()) else "are all -inf"
