"""Attention functions that transformers calls as ``attention_interface(module, q, k, v, mask,
...)``.

``TRIAL`` records the arguments of each layer's call; it gets a blank mask tensor, for which
``rule_of`` returns the mask function. ``PAGED`` writes K and V to the paged cache and attends over
it; it gets no mask.

Each attention module refers to the state of its own model, so several models can be loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from engine.kv.layout import PagedKV
from engine.models.chunked_attention import attend_in_chunks, chunked_meta
from engine.models.general_support import Misfit
from kernels import AttentionMeta, paged_attention
from kernels.reference.attention import AttentionOptions
from kernels.reference.kv_rows import encode_rows

PAGED = "metronome_paged"
TRIAL = "metronome_trial"
STATE = "metronome_state"  # attribute of an attention module
RULE = "metronome_rule"  # attribute of the storage of a trial's mask

MaskRule = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""(batch, head, query position, key position) -> True where the query attends to the key."""

# Arguments that do not change the result: gradients, bookkeeping, positions that q and k already
# contain, and the window, which is derived from the mask as in transformers' eager attention.
WITHOUT_EFFECT = frozenset(
    {
        "dropout",
        "position_ids",
        "position_embeddings",
        "cache_position",
        "sliding_window",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "return_dict",
        "use_cache",
        "past_key_values",
    }
)


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a layer's attention."""

    scale: float
    softcap: float
    sinks: torch.Tensor | None  # [Hq]


def read_options(scaling: float | None, head_dim: int, given: dict[str, Any]) -> Options:
    """The attention options in a call's arguments. Raises ``Misfit`` for an unsupported option."""
    softcap = sinks = None
    for name, value in given.items():
        if value is None or name in WITHOUT_EFFECT:
            continue
        if name == "softcap":
            softcap = value
        elif name == "s_aux":
            sinks = value.detach()
        elif name == "is_causal":
            if not value:
                raise Misfit("it attends to later tokens (is_causal=False)")
        elif value is not False:
            raise Misfit(f"it passes {name!r} to attention, which is not supported")
    scale = head_dim**-0.5 if scaling is None else float(scaling)
    return Options(scale, float(softcap or 0.0), sinks)


@dataclass(slots=True)
class AttentionCall:
    """The arguments of one attention call during a trial."""

    module: nn.Module
    query: torch.Tensor  # [1, Hq, N, D]
    key: torch.Tensor  # [1, Hkv, N, D]
    value: torch.Tensor  # [1, Hkv, N, Dv]
    mask: torch.Tensor | None
    scaling: float | None
    given: dict[str, Any]


def listen(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Record an attention call. Returns each token's own value as its output, so that no output
    depends on other tokens."""
    getattr(module, STATE).append(
        AttentionCall(module, query, key, value, attention_mask, scaling, given)
    )
    group = query.shape[1] // value.shape[1]
    return value.repeat_interleave(group, dim=1).transpose(1, 2).contiguous(), None


def blank_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: MaskRule,
    device: torch.device,
    **_: Any,
) -> torch.Tensor:
    """A mask of zeros. ``rule_of`` returns the mask function for it."""
    mask = torch.zeros(batch_size, 1, q_length, kv_length, device=device)
    setattr(mask.untyped_storage(), RULE, mask_function)
    return mask


def rule_of(mask: torch.Tensor | None) -> MaskRule | None:
    """The mask function of a mask made by ``blank_mask``, or of a view of it, such as a slice of
    all rows; ``None`` for other masks."""
    return None if mask is None else getattr(mask.untyped_storage(), RULE, None)


@dataclass(frozen=True, slots=True)
class AttentionLayer:
    """An attention layer of a module, found by a trial."""

    module: nn.Module
    cache: PagedKV
    """Shape and window of the keys and values that the layer reads."""
    source: int | None = None
    """Index of the earlier layer whose keys and values it reads; ``None``: it keeps its own."""


class AttentionStep:
    """State of a forward pass: where K and V are written, and how many layers have been called."""

    def __init__(self, attn: Sequence[AttentionMeta], kv: list[torch.Tensor]) -> None:
        """attn: metadata of each layer's attention; kv: each layer's KV cache."""
        self.num_calls = 0
        self._attn = attn
        self._kv = kv
        self._rows = (attn[0].slots >= 0).nonzero().squeeze(1)  # without padding
        self._places: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._chunked: dict[int, AttentionMeta] = {}

    def attend(
        self,
        queries: torch.Tensor,
        kv_layer: torch.Tensor,
        meta: AttentionMeta,
        cache: PagedKV,
        options: Options,
    ) -> torch.Tensor:
        """Attention of queries [N, Hq, D] over a layer's cache. Returns [N, Hq * D]."""
        window = cache.window
        if cache.is_chunked and window % meta.block_size:
            given = AttentionOptions(options.scale, 0, options.softcap, sinks=options.sinks)
            return attend_in_chunks(queries, kv_layer, meta, window, given)
        if cache.is_chunked:
            if meta.group not in self._chunked:
                self._chunked[meta.group] = chunked_meta(meta, window)
            meta, window = self._chunked[meta.group], 0
        return paged_attention(
            queries,
            kv_layer,
            meta,
            scale=options.scale,
            window=window,
            softcap=options.softcap,
            sinks=options.sinks,
        )

    def _places_of(self, meta: AttentionMeta) -> tuple[torch.Tensor, torch.Tensor]:
        """Cache block and offset of each token, without padding, in the layers of this KV group."""
        if meta.group not in self._places:
            slots = meta.slots[self._rows]
            self._places[meta.group] = (slots // meta.block_size, slots % meta.block_size)
        return self._places[meta.group]

    def next_layer(self) -> tuple[torch.Tensor, AttentionMeta]:
        """Go to the next layer. Returns its KV cache [blocks, 2, Hkv, block, D] and metadata."""
        call = self.num_calls
        self.num_calls += 1
        return self._kv[call], self._attn[call]

    def write(
        self,
        kv_layer: torch.Tensor,
        meta: AttentionMeta,
        keys: torch.Tensor,
        values: torch.Tensor,
    ) -> None:
        """Write keys and values [N, Hkv, D] to a layer's cache."""
        blocks, offsets = self._places_of(meta)
        for half, new in enumerate((keys, values)):
            kv_layer[blocks, half, :, offsets] = encode_rows(new[self._rows], kv_layer.dtype)


class TokenPositions:
    """Takes the place of transformers' cache for modules that add the number of cached tokens to
    the index of a token to get its position (Llama 4). Stores nothing."""

    def __init__(self, positions: torch.Tensor) -> None:
        """positions: of the step's tokens [N]."""
        self._offsets = positions - torch.arange(len(positions), device=positions.device)

    def get_seq_length(self, layer_idx: int = 0) -> torch.Tensor:
        """The difference between position and index of each token [N]."""
        return self._offsets

    def get_query_offset(self, layer_idx: int = 0) -> int:
        """Offset of the first query in a mask, for the trial."""
        return 0

    def get_mask_sizes(self, num_queries: int, layer_idx: int = 0) -> tuple[int, int]:
        """Number and offset of the keys in a mask, for the trial."""
        return num_queries, 0

    def update(
        self, keys: torch.Tensor, values: torch.Tensor, layer_idx: int = 0
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return keys, values


def cache_arguments(module: PreTrainedModel, positions: torch.Tensor) -> dict[str, Any]:
    """The arguments with which ``module`` uses these token positions [N], in addition to
    ``position_ids``; empty for most models."""
    text = module.config.get_text_config(decoder=True)
    if not getattr(text, "attn_temperature_tuning", False):
        return {}
    return {"past_key_values": TokenPositions(positions)}


@dataclass(slots=True)
class PagedState:
    """State shared by the attention modules of one model."""

    layers: tuple[AttentionLayer, ...]
    """The model's attention layers, in the order of their calls."""
    step: AttentionStep | None = None

    @contextmanager
    def during(self, attn: Sequence[AttentionMeta], kv: list[torch.Tensor]) -> Iterator[None]:
        """Set ``step`` during one forward pass, in which every attention layer must be called."""
        self.step = AttentionStep(attn, kv)
        try:
            yield
            assert self.step.num_calls == len(self.layers), "the module skipped attention layers"
        finally:
            self.step = None


def attend(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Paged attention: query [1, Hq, N, D], key [1, Hkv, N, D], value [1, Hkv, N, Dv] -> [1, N, Hq,
    Dv] and ``None``."""
    state: PagedState = getattr(module, STATE)
    assert state.step is not None, "the module was called outside a step"
    layer = state.layers[state.step.num_calls]
    assert layer.module is module, "the module calls its attention layers in another order"
    options = read_options(scaling, query.shape[-1], given)
    kv_layer, meta = state.step.next_layer()
    head_dim = layer.cache.stored_dim
    if layer.source is None:
        state.step.write(kv_layer, meta, _rows(key, head_dim), _rows(value, head_dim))
    queries = _rows(query, head_dim).to(value.dtype).contiguous()
    out = state.step.attend(queries, kv_layer, meta, layer.cache, options)
    out = out.view(queries.shape)[None, ..., : value.shape[-1]]
    return out.to(value.dtype).contiguous(), None


def _rows(heads: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rearrange [1, H, N, D] to [N, H, head_dim], padding each head with zeros to ``head_dim``."""
    rows = heads[0].transpose(0, 1)
    missing = head_dim - rows.shape[-1]
    return nn.functional.pad(rows, (0, missing)) if missing else rows


AttentionInterface.register(PAGED, attend)
AttentionInterface.register(TRIAL, listen)
AttentionMaskInterface.register(TRIAL, blank_mask)
