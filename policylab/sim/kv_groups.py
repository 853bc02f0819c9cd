"""KV groups of a simulated model: groups of layers with the same sliding window, read from an
option or from a model's config.json, and the KV blocks that they took at most."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.config.kv_groups import FULL, Group
from engine.errors import ConfigError
from engine.kv.layout import KVLayout, LayerCache, NoCache, PagedKV, make_layout
from engine.kv.manager import KVManager

FORM = re.compile(r"(-?\d+)(?:\*(\d+))?")
MOST_GROUPS = 256
BYTES = 2  # of a number in the cache
EXAMPLE = "0,1024*5"
SLIDING = "sliding_attention"


def parse_groups(text: str) -> tuple[Group, ...]:
    """The KV groups in a list of windows as in ``0,1024*5``: window, or window times number of
    groups. Windows are numbers as in ``size_of``. Raises ``ConfigError``."""
    windows: list[int] = []
    for part in text.replace(" ", "").split(","):
        found = FORM.fullmatch(part)
        if found is None:
            raise ConfigError(
                f"--kv-groups is {text!r}, must be the path of a model's config.json, or windows "
                f"in tokens (0: full attention, below 0: chunks), as in {EXAMPLE}"
            )
        windows += [int(found[1])] * min(int(found[2] or 1), MOST_GROUPS + 1)
    if not 1 <= len(windows) <= MOST_GROUPS:
        raise ConfigError(f"--kv-groups {text!r} has {len(windows)} groups, must have 1 to 256")
    return groups_with(windows)


def size_of(group: Group) -> int:
    """The group's sliding window in tokens, 0 for full attention; below 0: the size of chunks."""
    return -group.window if group.is_chunked else group.window


def groups_with(sizes: Iterable[int]) -> tuple[Group, ...]:
    """KV groups with these windows (numbers as in ``size_of``), those of full attention first."""
    in_order = sorted(sizes, key=lambda size: (size != 0, size))
    return tuple(Group(window=abs(size), is_chunked=size < 0) for size in in_order)


def layout_of(
    path: Path, *, block_size: int, max_num_batched_tokens: int, max_model_len: int | None
) -> KVLayout:
    """The layout of the KV cache, in 16-bit numbers, of the model whose config.json is at ``path``.
    max_model_len: ``None`` for the model's own limit. Raises ``ConfigError``."""
    try:
        config = _decoder_config(path)
        layers = layers_of(config)
        longest = max_model_len or int(config.max_position_embeddings)
    except Exception as error:  # code of transformers, run on the user's file
        raise ConfigError(
            f"--kv-groups {str(path)!r} is not the config.json of a model with attention: "
            f"{type(error).__name__}: {error}"
        ) from error
    return make_layout(
        layers,
        block_size=block_size,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest,
    )


def windows_of(path: Path) -> list[int]:
    """The sliding window of each layer in tokens, 0 for full attention, of the model whose
    config.json is at ``path``; empty if transformers does not know the model."""
    try:
        config = _decoder_config(path)
        kinds = getattr(config, "layer_types", None) or [SLIDING] * config.num_hidden_layers
        return [_paged(*each).window for each in zip(config.per_layer_config, kinds, strict=True)]
    except Exception:  # code of transformers, run on the user's file
        return []


def _decoder_config(path: Path) -> Any:
    """The configuration of a model's decoder, as transformers reads it from a config.json."""
    from transformers import AutoConfig

    folder = path if path.is_dir() else path.parent
    return AutoConfig.from_pretrained(str(folder), local_files_only=True).get_text_config(
        decoder=True
    )


def layers_of(config: Any) -> list[LayerCache]:
    """What each layer keeps in the cache, by transformers' configuration of a decoder."""
    num_own = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", None) or 0)
    kinds = getattr(config, "layer_types", None) or [SLIDING] * num_own
    layers: list[LayerCache] = [
        _paged(layer, kind)
        for layer, kind in zip(config.per_layer_config, kinds[:num_own], strict=False)
    ]
    return layers + [NoCache()] * (config.num_hidden_layers - num_own)


def _paged(layer: Any, kind: str) -> PagedKV:
    """The cache of a layer with this configuration, of this kind of attention."""
    window = getattr(layer, "sliding_window", None) or 0
    if getattr(layer, "use_sliding_window", True) is False and layer.model_type != "smollm3":
        window = 0  # SmolLM3 goes by its layer_types alone
    chunk = getattr(layer, "attention_chunk_size", None) or 0
    sizes = {SLIDING: window, "chunked_attention": chunk, "full_attention": 0}
    num_heads = layer.num_attention_heads
    num_kv_heads = getattr(layer, "num_key_value_heads", None) or num_heads
    if layer.model_type == "mimo_v2_flash" and kind == SLIDING:
        num_kv_heads *= 2  # in its code, not in its configuration
    return PagedKV(
        num_kv_heads=num_kv_heads,
        head_dim=getattr(layer, "head_dim", None) or layer.hidden_size // num_heads,
        value_dim=getattr(layer, "v_head_dim", None) or 0,
        window=sizes[kind],
        is_chunked=kind == "chunked_attention",
        dtype_bytes=BYTES,
    )


class KVPeaks:
    """The most KV blocks in use during a run: ``usage``, as a share of the pool, and ``blocks`` of
    each group. ``snapshots``: the largest share of the pool that held snapshots of states."""

    def __init__(self, groups: Sequence[Group] = (FULL,)) -> None:
        self.usage = self.snapshots = 0.0
        self._num_published = 0  # snapshots, when they were counted last
        self.blocks = [0] * len(groups)
        self._windows = list(map(size_of, groups))

    def note(self, kv: KVManager) -> None:
        """Include the present use of a KV manager's pool."""
        self.add(kv.usage, kv.num_used)
        snapshots = None if kv.states is None else kv.states.snapshots
        if snapshots is not None and snapshots.num_published != self._num_published:
            self._num_published = snapshots.num_published  # otherwise there are no more of them
            num_blocks = snapshots.count_cached() * snapshots.num_blocks
            self.snapshots = max(self.snapshots, num_blocks / kv.num_usable)

    def add(self, usage: float, blocks: Sequence[int]) -> None:
        """Include a use of the pool: its share, and the blocks of each group."""
        self.usage = max(self.usage, usage)
        self.blocks = list(map(max, self.blocks, blocks))

    def groups(self) -> list[dict[str, int]]:
        """For each group its window (a number as in ``size_of``) and its most blocks in use."""
        both = zip(self._windows, self.blocks, strict=True)
        return [{"window": window, "peak_blocks": blocks} for window, blocks in both]


def listed(groups: Sequence[Mapping[str, int]], value: str = "") -> str:
    """Groups as text: each kind of attention with its number of groups and, if ``value`` is the
    name of a number of theirs, its sum."""
    counts = Counter(group["window"] for group in groups)
    parts = []
    for window, count in counts.items():
        kind = "chunks" if window < 0 else "window"
        name = f"{kind} of {abs(window):,} tokens" if window else "full attention"
        many = f" ({count} groups)" if count > 1 else ""
        total = sum(group[value] for group in groups if group["window"] == window) if value else 0
        parts.append(f"{name}{many}" + (f": {total:,}" if value else ""))
    return "; ".join(parts)
