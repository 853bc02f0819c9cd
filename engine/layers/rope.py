"""What makes one rotary position embedding differ from another. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True, eq=False)
class RopeSpec:
    """One rotary embedding of a model; layers that share the object share its table."""

    rope_type: str
    """default, linear, dynamic, yarn, longrope, llama3 or proportional."""
    theta: float
    head_dim: int
    rotary_dim: int
    """Leading dimensions of a head that turn; the rest pass."""
    max_position: int
    """Longest sequence the model was made for, in tokens."""
    scaling: Mapping[str, Any]
    """The type's own parameters, named as in Hugging Face's ``rope_parameters``."""
