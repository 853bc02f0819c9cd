"""Sampler: from the logits of a step to its tokens."""

from __future__ import annotations

from collections.abc import Container, Sequence
from typing import NamedTuple

import numpy as np
import torch

from engine.messages.outputs import TokenLogprobs
from engine.messages.step import Column, NewSeq
from engine.sample.edits import Edit, edits_of
from engine.sample.logprobs import Ids, token_logprobs
from engine.sample.processors import LogitsProcessorFactory, ProcessorError
from kernels.sampling import choose_tokens

SEED_BITS = 2**64 - 1


class SampleOutput(NamedTuple):
    """What was sampled, one token a row; rows in errors failed alone and hold token 0."""

    token_ids: Column  # [R]
    logprobs: dict[int, TokenLogprobs]  # by row, for the requests that want them
    errors: dict[int, str]  # by row: why there is no token


class Sampler:
    """Chooses the next token of every row; keeps by slot what the live requests ask for.

    A row goes through the edits of `edits_of`, in that order, then one kernel applies temperature,
    min-p, top-k and top-p and draws. Log-probabilities are those of the logits as they came.
    The noise depends on the request's seed and the token's position only: a seeded request gives
    the same tokens in any batch, row or chunking, and after any preemption.
    """

    def __init__(
        self,
        *,
        vocab_size: int,
        max_num_seqs: int,
        device: str,
        logits_processors: Sequence[LogitsProcessorFactory] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._device = torch.device(device)
        self._factories = tuple(logits_processors)
        # Columns by slot; greedy requests have temperature 0.
        self._temperature = np.zeros(max_num_seqs, dtype=np.float64)
        self._top_k = np.zeros(max_num_seqs, dtype=np.int32)
        self._top_p = np.ones(max_num_seqs, dtype=np.float64)
        self._min_p = np.zeros(max_num_seqs, dtype=np.float64)
        self._seed = np.zeros(max_num_seqs, dtype=np.uint64)
        # Only slots that ask for something are in here.
        self._edits: dict[int, list[Edit]] = {}
        self._num_logprobs: dict[int, int] = {}

    def add(self, seq: NewSeq) -> None:
        """Take over a slot for a new or resumed sequence; nothing of its last user remains."""
        self.remove(seq.slot)
        params = seq.params
        self._temperature[seq.slot] = 0.0 if params.is_greedy else params.temperature
        self._top_k[seq.slot] = min(params.top_k, self._vocab_size)
        self._top_p[seq.slot] = params.top_p
        self._min_p[seq.slot] = params.min_p
        self._seed[seq.slot] = seq.seed & SEED_BITS
        if edits := edits_of(seq, self._factories, self._device):
            self._edits[seq.slot] = edits
        if params.logprobs is not None:
            self._num_logprobs[seq.slot] = params.logprobs

    def remove(self, slot: int) -> None:
        """Forget the sequence in a slot, if there is one."""
        self._edits.pop(slot, None)
        self._num_logprobs.pop(slot, None)

    @torch.inference_mode()
    def sample(
        self, logits: torch.Tensor, slots: Column, positions: Column, tokens: Column
    ) -> SampleOutput:
        """One token for each row of logits [R, V] float32, which may be changed in place.

        Row i belongs to slots[i]; its token will stand at positions[i] of the sequence, behind
        tokens[slots[i], :positions[i]], which must all be known. Rows whose logits are not finite,
        that have no token left, or whose custom processor fails are reported in `errors`.
        """
        assert logits.shape == (len(slots), self._vocab_size), logits.shape
        assert logits.dtype is torch.float32, logits.dtype
        logits = logits.detach().contiguous()
        wanting = self._rows_in(self._num_logprobs, slots)
        raw = logits[wanting] if wanting else logits[:0]  # copies, before anything is edited
        errors = self._edit(logits, slots, positions, tokens)
        chosen = choose_tokens(
            logits,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._seed[slots],
            positions,
        )
        for row in np.flatnonzero(chosen < 0).tolist():
            is_edited = int(slots[row]) in self._edits
            why = _why_none_left if is_edited else _why_none
            errors.setdefault(row, why(logits[row], int(positions[row])))
        chosen[list(errors)] = 0  # a token like any other, for the step that may already follow
        logprobs = self._logprobs(raw, wanting, slots, chosen)
        return SampleOutput(
            chosen, {row: entry for row, entry in logprobs.items() if row not in errors}, errors
        )

    @torch.inference_mode()
    def prompt_logprobs(self, logits: torch.Tensor, targets: Ids, num: int) -> list[TokenLogprobs]:
        """What logits [M, V] say of the M prompt tokens that follow, and the `num` most likely."""
        return token_logprobs(logits, targets, num)

    def _rows_in(self, wanted: Container[int], slots: Column) -> list[int]:
        if not wanted:
            return []
        return [row for row, slot in enumerate(slots.tolist()) if slot in wanted]

    def _edit(
        self, logits: torch.Tensor, slots: Column, positions: Column, tokens: Column
    ) -> dict[int, str]:
        """Apply each row's edits; returns why some rows failed."""
        errors: dict[int, str] = {}
        for row in self._rows_in(self._edits, slots):
            slot, position = int(slots[row]), int(positions[row])
            # Checked before the edits, as a mask would hide what is wrong with the model.
            if not torch.isfinite(logits[row].amax()):
                errors[row] = _why_none(logits[row], position)
                continue
            try:
                for edit in self._edits[slot]:
                    edit(logits[row], tokens[slot, :position])
            except ProcessorError as error:
                errors[row] = str(error)
        return errors

    def _logprobs(
        self, raw: torch.Tensor, rows: list[int], slots: Column, chosen: Column
    ) -> dict[int, TokenLogprobs]:
        """raw: [len(rows), V]. Requests that want equally many are worked out together."""
        by_num: dict[int, list[int]] = {}
        for i, row in enumerate(rows):
            by_num.setdefault(self._num_logprobs[int(slots[row])], []).append(i)
        found: dict[int, TokenLogprobs] = {}
        for num, group in by_num.items():
            members = [rows[i] for i in group]
            entries = token_logprobs(raw[group], chosen[members], num)
            found.update(zip(members, entries, strict=True))
        return found


def _why_none(logits: torch.Tensor, position: int) -> str:
    """What is wrong with the logits [V] that the model gave."""
    return f"the model's logits for position {position} {_flaw(logits)}"


def _why_none_left(logits: torch.Tensor, position: int) -> str:
    """What is wrong with logits [V] that were sound before they were edited."""
    if bool((logits == -torch.inf).all()):
        return (
            f"no token is left for position {position}: allowed_token_ids, bad_words, min_tokens "
            f"and logits processors mask all {len(logits)} tokens"
        )
    return f"after a logits processor the logits for position {position} {_flaw(logits)}"


def _flaw(logits: torch.Tensor) -> str:
    if bool(logits.isnan().any()):
        return "hold NaN"
    return "hold +inf" if bool((logits == torch.inf).any()) else "are all -inf"
