"""Checks of copies of recurrent states, on the host and by the kernel of GPUs."""

import torch

from engine.states.compute import Pieces, divide, pool_bytes, rows_of_bytes

ROWS, BLOCKS = 6, 100
PARTS = ((7,), (3, 5), (64, 64), (1, 2, 3))
SHAPES = (((2, 4),), ((5,), (3, 3), (1,)), ((3, 5), (16, 2)))


def check_states_in_blocks(
    shapes: tuple[tuple[int, ...], ...], parts: tuple[int, ...], dtype: torch.dtype = torch.float32
) -> None:
    """States are the same after they were copied to blocks and back. shapes: of each state tensor
    per request; parts: numbers of two bytes of a block in each tensor of the pool."""
    generator = torch.Generator().manual_seed(1)
    states = [torch.randn((ROWS, *shape), generator=generator).to(dtype) for shape in shapes]
    before = [one.clone() for one in states]
    pool = list(pool_bytes([torch.zeros(BLOCKS, n, dtype=torch.bfloat16) for n in parts], BLOCKS))
    own = list(divide([rows_of_bytes(one) for one in states], pool))
    size = 1 + max(piece.block for piece in own)
    total = sum(one[0].nbytes for one in states)
    assert size == -(-total // sum(one.shape[1] for one in pool))
    pieces = Pieces(own, torch.from_numpy)
    blocks = torch.randperm(BLOCKS, generator=generator)
    blocks = blocks[: 2 * size].view(2, size)
    pieces.save(torch.tensor([4, 1]), blocks)
    used = torch.cat([one[blocks.flatten()].flatten() for one in pool])
    assert sum(one.count_nonzero() for one in pool) == used.count_nonzero() > 0
    for one in states:
        one.zero_()
    pieces.load(torch.tensor([0, 5]), blocks)
    for one, was in zip(states, before, strict=True):
        assert torch.equal(one[[0, 5]], was[[4, 1]]) and not one[1:5].any()
