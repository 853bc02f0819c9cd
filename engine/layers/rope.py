"""The parameters of a rotary position embedding. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeSpec:
    """The parameters of a rotary embedding. Layers with the same object share one cos/sin table."""

    rope_type: str
    """default, linear, dynamic, yarn, longrope, llama3 or proportional."""
    theta: float
    head_dim: int
    rotary_dim: int
    """Number of leading dimensions of a head that are rotated."""
    max_position: int
    """Longest sequence that the model was trained for, in tokens."""
    scaling: Mapping[str, Any]
    """Parameters of the type, named as in transformers' ``rope_parameters``."""
