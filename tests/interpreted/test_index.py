"""Inputs built on the device: what the kernels write against plain torch, padding and all."""

import numpy as np
import pytest
import torch

from kernels.cpu import slots as cpu
from kernels.reference import index as reference
from kernels.reference.index import UNKNOWN, Inputs, SlotState
from kernels.triton import index

BLOCK = 16
NUM_SLOTS, MAX_BLOCKS, MOST_TOKENS = 6, 40, 512
POISON = -77
WINDOWS = (0, 40, 300)
NUM_GROUPS = len(WINDOWS)

bodies = pytest.mark.parametrize("body", [reference, index, cpu], ids=["torch", "triton", "cpu"])


@pytest.fixture
def rng(seed: int) -> np.random.Generator:
    return np.random.default_rng(seed)


def ints(rng: np.random.Generator, low: int, high: int, *size: int) -> torch.Tensor:
    return torch.from_numpy(rng.integers(low, high, size).astype(np.int32))


def new_state(rng: np.random.Generator) -> SlotState:
    return SlotState(
        num_computed=ints(rng, 0, 100, NUM_SLOTS),
        history=ints(rng, 0, 1000, NUM_SLOTS, MOST_TOKENS),
        block_tables=ints(rng, 1, 2**27, NUM_GROUPS, NUM_SLOTS, MAX_BLOCKS),  # beyond 32 bits
        windows=torch.tensor(WINDOWS, dtype=torch.int32),
    )


def room(num_seqs: int, num_tokens: int) -> Inputs:
    def poisoned(*size: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.full(size, POISON, dtype=dtype)

    return Inputs(
        input_ids=poisoned(num_tokens),
        positions=poisoned(num_tokens, dtype=torch.int64),
        cache_slots=poisoned(NUM_GROUPS, num_tokens, dtype=torch.int64),
        seq_lens=poisoned(num_seqs),
        block_tables=poisoned(NUM_GROUPS, num_seqs, MAX_BLOCKS),
    )


def starts_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32)


@bodies
@pytest.mark.parametrize("is_shifted", [False, True])
def test_inputs_of_a_mixed_step(body: object, is_shifted: bool, rng: np.random.Generator) -> None:
    """A decode, two verifications, a long chunk, a padded sequence, padded tokens."""
    state = new_state(rng)
    if is_shifted:
        state = state._replace(shifts=ints(rng, -50, 1, NUM_SLOTS))
    counts = [1, 4, 300, 2, 0]
    slots = torch.tensor([3, 0, 5, 1, -1], dtype=torch.int32)
    host_ids = torch.full((320,), UNKNOWN, dtype=torch.int32)
    host_ids[5:305] = ints(rng, 0, 1000, 300)
    got, wanted = room(5, 320), room(5, 320)
    kept = [column.clone() for column in state[:4]]
    body.preparation(state, slots, starts_of(counts), host_ids, got, BLOCK)()
    reference.prepare_inputs(state, slots, starts_of(counts), host_ids, wanted, BLOCK)
    for mine, theirs in zip(got[:5], wanted[:5], strict=True):
        assert torch.equal(mine, theirs)
    assert all(torch.equal(*pair) for pair in zip(state[:4], kept, strict=True))
    assert got.input_ids[0] == state.history[3, state.num_computed[3]]
    there = slice(int(state.num_computed[0]), int(state.num_computed[0]) + 4)
    assert torch.equal(got.input_ids[1:5], state.history[0, there])
    assert got.input_ids[5:305].tolist() == host_ids[5:305].tolist()
    assert (got.cache_slots[:, 307:] == -1).all() and got.seq_lens[4] == 0


@bodies
def test_nothing_is_read_beyond_the_blocks_in_use(body: object, rng: np.random.Generator) -> None:
    state = new_state(rng)
    state.num_computed[2] = 31
    state.block_tables[:, 2, 2:] = POISON
    inputs = room(1, 1)
    one = torch.tensor([2], dtype=torch.int32)
    ids = torch.tensor([UNKNOWN], dtype=torch.int32)
    body.preparation(state, one, starts_of([1]), ids, inputs, BLOCK)()
    assert torch.equal(inputs.cache_slots[:, 0], state.block_tables[:, 2, 1].long() * BLOCK + 15)
    assert torch.equal(inputs.block_tables[:, 0, :2], state.block_tables[:, 2, :2])
    assert (inputs.block_tables[:, 0, 2:] == POISON).all()


@bodies
def test_of_a_window_only_the_end_is_copied(body: object, rng: np.random.Generator) -> None:
    """From the beginning of the largest tile of keys that holds the window's first key."""
    state = new_state(rng)
    state.num_computed[2] = 505
    inputs, one = room(1, 3), torch.tensor([2], dtype=torch.int32)
    ids = torch.full((3,), UNKNOWN, dtype=torch.int32)
    body.preparation(state, one, starts_of([3]), ids, inputs, BLOCK)()
    for group, first in enumerate((0, 256 // BLOCK, 0)):
        assert (inputs.block_tables[group, 0, :first] == POISON).all()
        upto = slice(first, -(-508 // BLOCK))
        assert torch.equal(inputs.block_tables[group, 0, upto], state.block_tables[group, 2, upto])


@bodies
def test_block_tables_grow_by_what_was_added(body: object, rng: np.random.Generator) -> None:
    tables = new_state(rng).block_tables[0]
    wanted = tables.clone()
    cells = rng.permutation(NUM_SLOTS * MAX_BLOCKS)[:200]
    slots = torch.from_numpy((cells // MAX_BLOCKS).astype(np.int32))
    places = torch.from_numpy((cells % MAX_BLOCKS).astype(np.int32))
    blocks = ints(rng, 0, 100, 200)
    slots[::5] = -1
    for slot, place, block in zip(slots.tolist(), places.tolist(), blocks, strict=True):
        if slot >= 0:
            wanted[slot, place] = block
    body.grow_block_tables(tables, slots, places, blocks)
    assert torch.equal(tables, wanted)


def unwritten(state: SlotState) -> SlotState:
    """Nothing was drawn yet."""
    return state._replace(history=torch.full_like(state.history, POISON))


@bodies
def test_slots_advance_by_what_stands(body: object, rng: np.random.Generator) -> None:
    """A decode, all drafts, one of them, none, half a prompt, nobody, a row that failed, one that
    draws nothing, a draft in the place of a failure."""
    state = unwritten(new_state(rng))
    before = state.num_computed.clone()
    slots = torch.tensor([4, 0, 2, 1, 5, -1, 3], dtype=torch.int32)
    counts, rows = [1, 4, 4, 3, 50, 1, 2], [1, 4, 4, 3, 0, 1, 2]
    tokens = ints(rng, 0, 1000, sum(rows))
    drafts = tokens.clone()
    ends = np.cumsum(rows)
    drafts[torch.from_numpy(ends[[0, 1, 2, 3, 5, 6]] - 1)] = -1  # none behind the last
    drafts[6] += 1  # the second of slot 2
    drafts[9] += 1  # the first of slot 1
    tokens[13] = -1  # of slot 3
    drafts[13] = -1
    row_slots = slots.repeat_interleave(torch.tensor(rows))
    drawn = reference.Drawn(tokens.clone(), row_slots, starts_of(rows), drafts)
    body.advance(state, slots, starts_of(counts), drawn)
    assert (state.num_computed - before).tolist() == [4, 1, 2, 1, 1, 50]
    kept = tokens.clone()
    kept[[7, 8, 10, 11, 14]] = reference.REJECTED
    assert torch.equal(drawn.tokens, kept)
    wanted = torch.full_like(state.history, POISON)
    for slot, said in ((4, [0]), (0, [1, 2, 3, 4]), (2, [5, 6]), (1, [9])):
        begin = int(before[slot]) + 1
        wanted[slot, begin : begin + len(said)] = tokens[said]
    wanted[3, int(before[3]) + 1] = 0
    assert torch.equal(state.history, wanted)


@bodies
def test_a_row_behind_drafts_that_has_no_token_is_computed_again(
    body: object, rng: np.random.Generator
) -> None:
    """Two drafts are right and the row behind the second has failed; all fail; the second does."""
    state = new_state(rng)
    before = state.num_computed.clone()
    slots = torch.tensor([3, 1, 0], dtype=torch.int32)
    tokens = torch.tensor([5, 6, -1, -1, 8, 9, 4, -1, 3], dtype=torch.int32)
    drafts = torch.tensor([5, 6, -1, 7, 8, -1, 4, 2, -1], dtype=torch.int32)
    starts = starts_of([3, 3, 3])
    drawn = reference.Drawn(tokens.clone(), slots.repeat_interleave(3), starts, drafts)
    body.advance(state, slots, starts, drawn)
    R = reference.REJECTED
    assert drawn.tokens.tolist() == [5, 6, R, -1, R, R, 4, R, R]
    assert (state.num_computed - before).tolist() == [1, 1, 0, 2, 0, 0]
    said = [int(state.history[slot, state.num_computed[slot]]) for slot in (3, 1, 0)]
    assert said == [6, 0, 4]


@bodies
def test_rows_without_drafts_all_stand(body: object, rng: np.random.Generator) -> None:
    state = unwritten(new_state(rng))
    before = state.num_computed.clone()
    slots = torch.tensor([2, -1, 5, 0], dtype=torch.int32)
    row_slots = torch.tensor([2, -1, -1, 0], dtype=torch.int32)  # slot 5 is not to draw
    tokens = torch.tensor([7, 8, 9, -1], dtype=torch.int32)
    starts = starts_of([1, 1, 1, 1])
    drawn = reference.Drawn(tokens.clone(), row_slots, starts, None)
    body.advance(state, slots, starts, drawn)
    assert torch.equal(drawn.tokens, tokens)
    assert (state.num_computed - before).tolist() == [1, 0, 1, 0, 0, 1]
    assert [int(state.history[slot, state.num_computed[slot]]) for slot in (2, 0)] == [7, 0]
    assert (state.history != POISON).sum() == 2


@bodies
def test_drafts_are_remembered_where_they_stand(body: object, rng: np.random.Generator) -> None:
    history = unwritten(new_state(rng)).history
    slots, positions = (torch.tensor(x, dtype=torch.int32) for x in ([1, 1, 4], [3, 4, 9]))
    body.remember(history, slots, positions, torch.tensor([5, 6, 7], dtype=torch.int32))
    assert history[1, 3:5].tolist() == [5, 6] and history[4, 9] == 7
    assert (history != POISON).sum() == 3
