"""Rotary positions along several axes (M-RoPE): each pair of dimensions is rotated by the position
along one axis, e.g. time, height or width within a picture."""

from __future__ import annotations

import torch

from engine.layers.rope import RopeSpec


def axes_of(rope: RopeSpec) -> tuple[int, ...]:
    """The axis of each pair of dimensions; () if positions have one axis."""
    sections = rope.scaling.get("mrope_section")
    if not sections:
        return ()
    num_pairs = rope.rotary_dim // 2
    if not rope.scaling.get("mrope_interleaved"):
        axes = [axis for axis, size in enumerate(sections) for _ in range(size)]
        return tuple((axes + [0] * num_pairs)[:num_pairs])
    count = len(sections)
    return tuple(
        pair % count if pair < count * sections[pair % count] else 0 for pair in range(num_pairs)
    )


def rows_along(axes: tuple[int, ...], positions: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    """Cosines and sines [N, rotary_dim] of positions [K, N] along K axes. axes: of each pair;
    table: for positions along one axis, [P, rotary_dim]."""
    pairs = torch.arange(len(axes), device=table.device)
    rows = positions[torch.tensor(axes, device=positions.device)].T.to(table.device)  # [N, pairs]
    return torch.cat([table[rows, pairs], table[rows, pairs + len(axes)]], dim=1)
