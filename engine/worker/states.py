"""Memory of recurrent states: for each slot some copies of each layer's state, outside the KV
pool."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from engine.config.engine import ResolvedConfig
from engine.config.gpu_memory import GIB
from engine.config.speculative import SpeculativeConfig
from engine.errors import ModelError
from engine.kv.layout import (
    DTYPE_BYTES,
    KVLayout,
    LayerCache,
    RecurrentState,
    StateTensor,
    state_bytes,
)
from engine.messages.step import StepPlan
from engine.models.model import LayerCaches
from engine.worker.memory import Zeros
from kernels.meta import StateMeta
from kernels.slots import Inputs

STATE_DTYPE_KEYS = ("mamba_ssm_cache_dtype", "mamba_ssm_dtype")  # of config.json
DRAFT_SHARE = 0.25  # of the memory for states and KV that copies of states for drafts may take
OF_STATES = -1  # in place of a KV group: the layer keeps a recurrent state

logger = logging.getLogger("engine.worker")

States = tuple[tuple[torch.Tensor, ...], ...]
"""The state tensors of each layer, () for a layer without a state. Copy c of slot s is row s *
number of copies + c of each tensor."""


def most_drafts(config: ResolvedConfig, request_bytes: int, free_bytes: float) -> int:
    """The most drafts per decode for which states are copied: ``num_speculative_tokens``, or fewer
    if the copies of all slots would take more than ``DRAFT_SHARE`` of ``free_bytes``; at least 1
    if there are drafts. request_bytes: of one copy of a request's states."""
    requested, num_seqs = _num_drafts(config), config.scheduler.max_num_seqs
    if not (requested and request_bytes):
        return requested
    each = num_seqs * request_bytes
    most = max(1, min(requested, int(free_bytes * DRAFT_SHARE) // each))
    logger.info(
        "Each draft that a decode verifies needs a copy of the recurrent states: %.3f GiB for "
        "max_num_seqs=%d. Up to %d drafts per decode take %.0f %% of the memory for states and KV",
        *(each / GIB, num_seqs, most, 100 * most * each / max(1.0, free_bytes)),
    )
    if most < requested:
        logger.warning(
            "num_speculative_tokens is %d, but %d is used: copies of recurrent states for more "
            "drafts would take over %.0f %% of that memory. Lower max_num_seqs for more drafts",
            *(requested, most, 100 * DRAFT_SHARE),
        )
    return most


def num_copies(config: ResolvedConfig) -> int:
    """Number of copies of each state: one to read, and one for each number of kept drafts."""
    return 2 + _num_drafts(config)


def _num_drafts(config: ResolvedConfig) -> int:
    """The configured number of drafts per decode, 0 without drafts."""
    options = config.scheduler.speculative_config
    return 0 if options is None else SpeculativeConfig.of(options).num_speculative_tokens


def check_drafts(plan: StepPlan, num_copies: int) -> None:
    """Raise ``RuntimeError`` if a row of the plan has more drafts than the states have copies for.
    num_copies: of each state, 0 for a model without recurrent states."""
    if num_copies and plan.drafts is not None:
        most = int(plan.drafts.counts.max(initial=0))
        if most > num_copies - 2:
            raise RuntimeError(
                f"step {plan.step} has a row with {most} drafts, and the recurrent states of this "
                f"model have copies for {num_copies - 2}: set num_speculative_tokens in "
                f"speculative_config to at least {most}"
            )


def inputs_of(inputs: Inputs, num_seqs: int, num_tokens: int) -> Inputs:
    """The views of the input tensors for a step with this many sequences and tokens."""
    reads, writes = inputs.state_reads, inputs.state_writes
    return Inputs(
        inputs.input_ids[:num_tokens],
        inputs.positions[:num_tokens],
        inputs.cache_slots[:, :num_tokens],
        inputs.seq_lens[:num_seqs],
        inputs.block_tables[:, :num_seqs],
        None if reads is None else reads[:num_seqs],
        None if writes is None else writes[:num_seqs],
        inputs.num_seqs,
    )


def state_meta(
    inputs: Inputs, query_start: torch.Tensor, lengths: tuple[int, int], batch_invariant: bool
) -> StateMeta:
    """Make the metadata of a step's layers with recurrent states. lengths: number of decodes, and
    most tokens of a sequence."""
    assert inputs.state_reads is not None and inputs.state_writes is not None
    assert inputs.num_seqs is not None
    return StateMeta(
        query_start=query_start,
        state_reads=inputs.state_reads,
        state_writes=inputs.state_writes,
        num_seqs=inputs.num_seqs,
        num_decodes=lengths[0],
        max_query_len=lengths[1],
        batch_invariant=batch_invariant,
    )


def with_state_dtype(
    layers: Sequence[LayerCache], requested: str, hf: Mapping[str, Any]
) -> list[LayerCache]:
    """The caches of a model's layers if the option ``mamba_ssm_cache_dtype`` is ``requested``. hf:
    the contents of config.json, which may name a dtype for "auto". Raises ``ModelError`` if that
    dtype is not supported."""
    if not state_bytes(layers):
        return list(layers)
    dtype = _dtype_of_model(hf) if requested == "auto" else requested
    return [
        replace(layer, tensors=tuple(_stored_in(tensor, dtype) for tensor in layer.tensors))
        if isinstance(layer, RecurrentState)
        else layer
        for layer in layers
    ]


def _dtype_of_model(hf: Mapping[str, Any]) -> str:
    """The dtype of state matrices that config.json names, else float32."""
    key = next((key for key in STATE_DTYPE_KEYS if hf.get(key) is not None), None)
    if key is None:
        return "float32"
    name = str(hf[key]).removeprefix("torch.")
    if name not in DTYPE_BYTES:
        raise ModelError(
            f"config.json's {key} is {hf[key]!r}, supported: {', '.join(DTYPE_BYTES)}; choose one "
            "with the option mamba_ssm_cache_dtype"
        )
    return name


def _stored_in(tensor: StateTensor, dtype: str) -> StateTensor:
    """The tensor in a dtype, if it is one whose dtype can be chosen."""
    return tensor._replace(dtype=dtype) if tensor.is_sum else tensor


def make_states(layers: Sequence[LayerCache], num_rows: int, zeros: Zeros) -> States:
    """Allocate the state tensors of a model's layers, each with this many rows."""
    return tuple(
        tuple(
            zeros((num_rows, *tensor.shape), getattr(torch, tensor.dtype))
            for tensor in layer.tensors
        )
        if isinstance(layer, RecurrentState)
        else ()
        for layer in layers
    )


def enter_states(caches: LayerCaches, states: States) -> None:
    """Enter the state tensors among what the layers keep."""
    for index, tensors in enumerate(states):
        if tensors:
            caches[index] = tensors


def num_bytes(states: States) -> int:
    """Bytes of all state tensors."""
    return sum(tensor.nbytes for layer in states for tensor in layer)


def groups_of(layers: Sequence[LayerCache], layout: KVLayout) -> list[int]:
    """The KV group of each layer, ``OF_STATES`` for a layer with a recurrent state."""
    return [
        OF_STATES if isinstance(layer, RecurrentState) else group
        for layer, group in zip(layers, layout.group_of, strict=True)
    ]
