"""What a model's forward pass is given."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.meta import AttentionMeta


@dataclass(slots=True)
class ForwardBatch:
    """The tokens of one step, flattened over its sequences (decodes first)."""

    input_ids: torch.Tensor  # [N] int64
    positions: torch.Tensor  # [N] int64
    attn: AttentionMeta
    sample_rows: torch.Tensor  # [R] int64: rows of the hidden states whose logits are wanted
