"""Recurrent states in blocks of the KV pool: every byte has its place."""

from __future__ import annotations

import pytest
import torch

from engine.states.compute import divide, load, pool_bytes, rows_of_bytes, save

ROWS, BLOCKS = 6, 100


@pytest.mark.parametrize("parts", [(7,), (3, 5), (64, 64), (1, 2, 3)])
@pytest.mark.parametrize("shapes", [((2, 4),), ((5,), (3, 3), (1,)), ((3, 5), (16, 2))])
def test_a_state_survives_in_any_blocks(shapes, parts):
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn((ROWS, *shape), generator=generator) for shape in shapes]
    before = [one.clone() for one in states]
    pool = list(pool_bytes([torch.zeros(BLOCKS, n, dtype=torch.bfloat16) for n in parts], BLOCKS))
    pieces = list(divide([rows_of_bytes(one) for one in states], pool))
    size = 1 + max(piece.block for piece in pieces)
    total = sum(one[0].nbytes for one in states)
    assert size == -(-total // sum(one.shape[1] for one in pool))
    blocks = torch.randperm(BLOCKS, generator=generator)
    blocks = blocks[: 2 * size].view(2, size)
    save(pieces, torch.tensor([4, 1]), blocks)
    for one in states:
        one.zero_()
    load(pieces, torch.tensor([0, 5]), blocks)
    for one, was in zip(states, before, strict=True):
        assert torch.equal(one[[0, 5]], was[[4, 1]]) and not one[1:5].any()
