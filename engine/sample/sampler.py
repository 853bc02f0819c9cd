"""Samples tokens from the logits of a step, in three phases:

    prepare   copy logits for log-probabilities; apply masks, edits, penalties and processors
    draw      apply temperature, min-p, top-k and top-p, add noise and choose the tokens; reads only
              tensors on the device, so a CUDA graph may contain it
    finish    count sampled tokens for penalties; compute log-probabilities

The noise depends only on the request's seed and the token's position. A seeded request therefore
gets the same tokens from the same logits, however its steps are batched.
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
from engine.sample.parts import Masks, Vocabulary
from engine.sample.processors import LogitsProcessorFactory, NamedProcessor, ProcessorError
from kernels import slots as on_slots
from kernels.slots import Rows, SamplingColumns


class DraftRows(NamedTuple):
    """The draft tokens (speculative decoding) that belong to each sampled row of logits."""

    judged: Column  # [R], the draft at the position to sample; -1: none
    before: NDArray[np.int32]  # [R, K], drafts of the sequence before this position; -1: none


class RowMasks(NamedTuple):
    """Bit masks of the allowed tokens of sampled rows."""

    words: torch.Tensor  # [M, V / 32] int32 on the device, one bit per token
    of_row: Column  # [R], mask index of each row; -1: none


class Draws(NamedTuple):
    """The request and the token position of each of the R rows of logits from which a step
    samples."""

    rows: Column  # [R], row of the plan
    slots: Column  # [R]; -1: padding, or a row that does not sample
    positions: Column  # [R], position of the token to sample
    drafts: DraftRows | None = None
    is_padded: bool = False  # some rows may be padding


class RawRows(NamedTuple):
    """Unedited logits of the rows for which ``num`` log-probabilities are wanted."""

    num: int
    rows: list[int]  # sampled rows
    places: torch.Tensor  # ``rows`` on the device
    logits: torch.Tensor


class Drawing(NamedTuple):
    """The state that ``Sampler.prepare`` passes on to ``draw`` and ``finish``."""

    errors: dict[int, str]  # by row that gets no token
    edited: list[int]  # rows whose logits were changed
    checked: list[int]  # edited rows whose logits were checked before
    sound: torch.Tensor | None  # [len(checked)] bool: logits of the checked rows were valid
    seats: torch.Tensor | None  # [R], seats in the penalty tables
    raw: list[RawRows]
    barred: set[int]  # rows with an error because their own parameters forbid all tokens
    masks: RowMasks | None = None  # for ``draw``, of rows without other edits


class RowScores(NamedTuple):
    """Log-probabilities of the tokens sampled in some rows; ``rows``: indices of these rows."""

    rows: list[int]
    scored: Scored


class SlotTables(NamedTuple):
    """Tensors on the device with one entry per slot (running sequence), which the sampler reads."""

    requested: SamplingColumns  # options of the choice
    history: torch.Tensor  # [slots, max_len] int32, output tokens by position
    num_prompt: torch.Tensor  # [slots] int32


class Sampler:
    """Edits logits and samples a token for each row.

    A row fails, with a reason, if its logits are invalid, if no token is allowed, or if its custom
    processor fails; other rows are not affected.
    """

    def __init__(
        self,
        upload: Upload,
        tables: SlotTables,
        vocabulary: Vocabulary,
        factories: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        """vocabulary: whose logits it is given."""
        self.vocabulary = vocabulary
        self._upload = upload
        self._tables = tables
        self._factories = tuple(factories)
        self._edits = EditTables(upload, len(tables.num_prompt), vocabulary.width)
        self._penalties = PenaltyTables(upload, vocabulary.width)
        self._processors: dict[int, list[NamedProcessor]] = {}
        self._num_prompt: dict[int, int] = {}  # of slots with processors
        self._edited: set[int] = set()  # slots with edits, penalties or processors
        self._num_logprobs: dict[int, int] = {}
        self._random: set[int] = set()  # slots with temperature > 0
        self._truncated: set[int] = set()  # slots with top-k, top-p or min-p

    @property
    def wants_largest_only(self) -> bool:
        """True if all sequences are greedy, without edits and log-probabilities."""
        return self.is_plain and not self._random

    @property
    def is_plain(self) -> bool:
        """True if all sequences are without edits and log-probabilities, so that nothing must be
        done between the forward pass and the choice of tokens."""
        return not (self._edited or self._num_logprobs)

    def add(self, seq: NewSeq, spec: SamplingSpec) -> None:
        """Register a sequence that starts or resumes in its slot, replacing any earlier one
        there."""
        slot = seq.slot
        self.remove(slot)
        self._edits.add(slot, self.vocabulary.spec(spec))
        if spec.penalties is not None:
            known = np.array(seq.token_ids, dtype=np.int32)
            counted = (known[: seq.num_prompt], known[seq.num_prompt :])
            self._penalties.add(slot, spec.penalties, *map(self.vocabulary.here, counted))
        named = [NamedProcessor(factory, seq) for factory in self._factories]
        if processors := [processor for processor in named if processor.is_wanted]:
            self._processors[slot] = processors
            self._num_prompt[slot] = seq.num_prompt
        if spec.edits_logits or slot in self._processors:
            self._edited.add(slot)
        if spec.temperature != 0:
            self._random.add(slot)
        if spec.truncates:
            self._truncated.add(slot)
        if spec.num_logprobs is not None:
            self._num_logprobs[slot] = spec.num_logprobs
        output = seq.token_ids[seq.num_prompt :]
        if output and (spec.words or slot in self._processors):
            tokens = self._upload(np.array(output, dtype=np.int32))
            self._tables.history[slot, seq.num_prompt : len(seq.token_ids)] = tokens

    def remove(self, slot: int) -> None:
        """Remove the sequence in a slot, if there is one."""
        self._edits.remove(slot)
        self._penalties.remove(slot)
        self._processors.pop(slot, None)
        self._num_prompt.pop(slot, None)
        self._edited.discard(slot)
        self._num_logprobs.pop(slot, None)
        self._random.discard(slot)
        self._truncated.discard(slot)

    def prepare(
        self,
        rows: Rows,
        draws: Draws,
        masks: RowMasks | None = None,
        *,
        may_leave_masks: bool = False,
    ) -> Drawing:
        """Copy logits for log-probabilities, then edit the logits [R, V] float32 in place.

        The token history must already contain the drafts before each sampled position. With
        ``may_leave_masks``, a mask that is a row's only edit is not applied but returned in
        ``Drawing.masks``, which must be passed to ``draw``."""
        if not (self._edited or self._num_logprobs or masks):
            return Drawing({}, [], [], None, None, [], set())
        slots = draws.slots.tolist()
        raw = self._copy_raw(rows.logits, slots)
        edited = [row for row, slot in enumerate(slots) if slot in self._edited]
        if masks is not None:
            edited = sorted({*edited, *np.flatnonzero(masks.of_row >= 0).tolist()})
        if not edited:
            return Drawing({}, [], [], None, None, raw, set())
        # Check the logits before the edits, which would hide NaN or infinity. If a mask is the only
        # edit of a row, it is left to ``draw``, which then reads little more than the allowed
        # tokens: applying a mask to all logits, or checking them, takes as long as sampling.
        checked, late = edited, None
        if masks is not None and may_leave_masks:
            needs_check = self._edited | self._num_logprobs.keys()  # log-probabilities show NaN
            checked = [row for row in edited if slots[row] in needs_check]
            masks, late = _divided(masks, checked)
        sound, errors = None, {}
        if checked:
            places = self._upload(np.array(checked))
            sound = self.vocabulary.are_sound(rows.logits, places)
            errors = self._unsound(rows.logits, draws, checked, sound)
        if masks is not None:
            words = self.vocabulary.words(masks.words)
            on_slots.apply_bitmask(rows.logits, words, self._upload(masks.of_row))
        history, num_prompt = self._tables.history, self._tables.num_prompt
        self._edits.apply(rows, draws.slots, history, num_prompt)
        seats = self._penalties.seats(draws.slots)
        if seats is not None:
            before = None
            if draws.drafts is not None:
                before = self._upload(self.vocabulary.places(draws.drafts.before))
            self._penalties.apply(rows, seats, before)
        self._process(rows.logits, draws, errors)
        if sound is not None:
            first = rows.logits[places, 0]
            rows.logits[places, 0] = torch.where(sound, first, torch.nan)
        return Drawing(errors, edited, checked, sound, seats, raw, set(), late)

    def can_preview(self, slot: int) -> bool:
        """True if the slot can be sampled before its grammar mask is known: if the mask then allows
        the token, sampling with the mask would have given the same one."""
        return slot >= 0 and slot not in self._edited and slot not in self._truncated

    @property
    def way(self) -> str:
        """How ``draw`` computes the tokens of a step now; see ``Vocabulary.ways``."""
        return self.vocabulary.way(truncates=bool(self._truncated))

    def draw(
        self, rows: Rows, masks: RowMasks | None = None, *, way: str | None = None
    ) -> torch.Tensor:
        """Sample one token for each row. Returns int32 tokens [R]; -1 for a row without a token.
        way: ``None`` for that of the sequences that are there."""
        on_device = None if masks is None else Masks(masks.words, self._upload(masks.of_row))
        way = self.way if way is None else way
        return self.vocabulary.draw(rows, self._tables.requested, on_device, way)

    def finish(
        self, rows: Rows, draws: Draws, drawing: Drawing, drawn: torch.Tensor
    ) -> list[RowScores]:
        """Count the sampled tokens ``drawn`` [R] for penalties and return their log-probabilities.
        Negative tokens are not counted. On a CPU, the reason why a row got no token is added to
        ``drawing.errors``."""
        if drawn.is_cpu and np.count_nonzero((tokens := drawn.numpy()) < 0):
            self._explain(rows.logits, draws, drawing, tokens)
        if drawing.seats is not None:
            self._penalties.count(drawing.seats, self.vocabulary.device_places(drawn))
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
            raw.append(RawRows(num, rows, places, self.vocabulary.whole(logits[places])))
        return raw

    def _process(self, logits: torch.Tensor, draws: Draws, errors: dict[int, str]) -> None:
        """Call the custom logits processors; the error text of a row whose processor fails is added
        to ``errors``."""
        if not self._processors:
            return
        columns = zip(draws.slots.tolist(), draws.positions.tolist(), strict=True)
        for row, (slot, position) in enumerate(columns):
            if slot not in self._processors or row in errors:
                continue
            output = self._tables.history[slot, self._num_prompt[slot] : position].tolist()
            whole = self.vocabulary.whole(logits[row : row + 1])[0]
            try:
                for process in self._processors[slot]:
                    process(output, whole)
                self.vocabulary.put(logits[row], whole)
            except ProcessorError as error:
                errors[row] = str(error)
                logits[row, 0] = torch.nan  # so that the row gets no token

    def _unsound(
        self, logits: torch.Tensor, draws: Draws, edited: list[int], sound: torch.Tensor
    ) -> dict[int, str]:
        """Return the error text of each row with invalid logits, by row; empty on a GPU. ``sound``:
        for each row in ``edited``, whether its logits are valid."""
        if not sound.is_cpu:
            return {}
        bad = [edited[place] for place in np.flatnonzero(~sound.numpy()).tolist()]
        if not bad:
            return {}
        return _errors_of(self.vocabulary.whole(logits[bad]), draws, bad)

    def _explain(self, logits: torch.Tensor, draws: Draws, drawing: Drawing, drawn: Column) -> None:
        failed = [row for row in np.flatnonzero(drawn == -1).tolist() if draws.slots[row] >= 0]
        if not failed:
            return
        logits = self.vocabulary.whole(logits)  # also where only other ranks need them
        silent = [row for row in failed if row not in drawing.errors]
        if drawing.masks is not None:
            as_given = [row for row in silent if drawing.masks.of_row[row] >= 0]
            sound = on_slots.are_sound(logits, torch.tensor(as_given, dtype=torch.int64))
            unsound = [row for row, is_sound in zip(as_given, sound, strict=True) if not is_sound]
            drawing.errors.update(_errors_of(logits[unsound], draws, unsound))
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
                drawing.errors.update(_errors_of(logits[[row]], draws, [row]))


def _errors_of(logits: torch.Tensor, draws: Draws, rows: list[int]) -> dict[int, str]:
    """The error text of each of these rows, whose logits [rows, V] are invalid."""
    return {
        row: why_unsound(int(draws.positions[row]), flaw(of_row))
        for row, of_row in zip(rows, logits, strict=True)
    }


def _divided(masks: RowMasks, rows: list[int]) -> tuple[RowMasks | None, RowMasks | None]:
    """Split masks in two: those of the sampled rows in ``rows``, and those of all other rows. A
    half without masks is ``None``."""
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
    """Error text for a position with invalid logits; ``what``: what is wrong with them."""
    return f"the model's logits for position {position} {what}"


def why_none_left(position: int) -> str:
    """Error text for a position whose logits are valid, but whose edits forbid all tokens."""
    return (
        f"no token is left for position {position}: allowed_token_ids, bad_words, min_tokens, "
        "structured_outputs and logits processors together forbid all tokens"
    )


def flaw(logits: torch.Tensor) -> str:
    """Describe why no token can be sampled from the logits [V]: NaN, +inf, or all -inf."""
    if bool(logits.isnan().any()):
        return "hold NaN"
    return "hold +inf" if bool((logits == torch.inf).any()) else "are all -inf"
