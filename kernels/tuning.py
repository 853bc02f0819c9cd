"""Launch settings of the Triton kernels: a table, looked up on the host before each launch.

Never an autotuner: it cannot run while a graph is captured, and two runs of one program would get
different kernels, hence different last bits. Measured settings are entered here by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Processors of the largest device of a family; decode attention asks for twice as many programs.
PROCESSORS = {"sm_90": 132, "sm_80": 108, "gfx942": 304}
MAX_SPLITS = 32
# Fewer keys are not worth a share of their own: in batches that do not fill the device, or do.
LEAST_SHARE_KEYS, LEAST_FULL_SHARE_KEYS = 128, 1024
# Shares that there are programs for on each processor, likewise.
PROGRAMS_A_PROCESSOR, FULL_PROGRAMS_A_PROCESSOR = 2, 6
# In batches that fill the device, what is no longer than this is not worth a plan and a merge.
MOST_UNPLANNED_KEYS = 8192
# Of a chunk's part: its sums go through memory in float32 once more.
LEAST_PREFILL_KEYS = 512
# Query tokens up to which a sequence is split as single tokens are.
MAX_DECODE_TOKENS = 8
MAX_PREFILL_ROWS = 128
# Rows times parts of the keys that a recorded step with prompt tokens has memory for.
MOST_PART_ROWS = 4096


class Tile(NamedTuple):
    """A program's share: packed query rows, keys a step, warps, loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


class Kind(NamedTuple):
    """What a tile is chosen by: bytes of a query and of a cache element, padded head size."""

    query_bytes: int
    cache_bytes: int
    head_dim: int  # at least 64: smaller heads take its settings


class Shares(NamedTuple):
    """Into how many shares the keys of all sequences are cut, and the least of one."""

    num: int
    least_keys: int

    def most_items(self, num_seqs: int) -> int:
        """Shares and the rests of sequences: a sequence has one more than what fills its shares."""
        return self.num + num_seqs

    def most_slots(self, num_seqs: int) -> int:
        """Items of sequences that are longer than a share, of which there are fewer than shares."""
        return self.most_items(min(num_seqs, self.num))


class Splits(NamedTuple):
    """Into how many parts the keys of each sequence are split at most, and the least of a part."""

    num: int
    least_keys: int


# Query rows a program -> (keys, warps, stages); the first entry that holds the rows is taken.
_Rows = dict[int, tuple[int, int, int]]
_Table = dict[str, dict[Kind, _Rows]]

_DECODE: _Table = {
    "sm_90": {
        Kind(2, 2, 64): {64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 2, 128): {16: (64, 2, 2), 64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 2, 256): {32: (32, 4, 3), 64: (32, 8, 3)},
        Kind(2, 1, 64): {64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 1, 128): {16: (64, 4, 3), 32: (64, 8, 3), 128: (32, 8, 3)},
        Kind(2, 1, 256): {16: (32, 4, 3), 64: (32, 8, 3)},
        Kind(4, 4, 64): {16: (32, 4, 2), 32: (32, 8, 1)},
        Kind(4, 4, 128): {16: (16, 8, 2)},
        Kind(4, 4, 256): {16: (16, 8, 2)},
    },
    "sm_80": {
        Kind(2, 2, 64): {32: (64, 4, 3), 128: (64, 8, 2)},
        Kind(2, 2, 128): {32: (64, 4, 3), 64: (32, 8, 2), 128: (16, 8, 2)},
        Kind(2, 2, 256): {32: (32, 4, 2), 64: (32, 8, 2)},
        Kind(4, 4, 64): {16: (32, 4, 2), 32: (32, 8, 1)},
        Kind(4, 4, 128): {16: (16, 8, 2)},
        Kind(4, 4, 256): {16: (16, 8, 2)},
    },
    "gfx942": {
        Kind(2, 2, 64): {128: (64, 4, 1)},
        Kind(2, 2, 128): {16: (64, 4, 1), 128: (32, 8, 1)},
        Kind(2, 2, 256): {16: (32, 4, 1), 64: (32, 8, 1)},
    },
}

_PREFILL: _Table = {
    "sm_90": {
        Kind(2, 2, 64): {64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 2, 128): {64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 2, 256): {32: (32, 4, 3), 128: (32, 8, 3)},
        Kind(2, 1, 64): {64: (64, 4, 3), 128: (64, 8, 3)},
        Kind(2, 1, 128): {64: (32, 4, 3), 128: (64, 8, 3)},
        Kind(2, 1, 256): {16: (32, 4, 3), 128: (16, 8, 3)},
        Kind(4, 4, 64): {16: (32, 4, 2), 32: (32, 8, 1)},
        Kind(4, 4, 128): {16: (16, 8, 2)},
        Kind(4, 4, 256): {16: (16, 8, 2)},
    },
    "sm_80": {
        Kind(2, 2, 64): {16: (64, 4, 3), 32: (64, 4, 2), 64: (32, 4, 2), 128: (64, 8, 2)},
        Kind(2, 2, 128): {16: (64, 4, 2), 64: (32, 4, 2)},
        Kind(2, 2, 256): {32: (32, 4, 2), 64: (32, 8, 2)},
        Kind(4, 4, 64): {16: (32, 4, 2), 32: (32, 8, 1)},
        Kind(4, 4, 128): {16: (16, 8, 2)},
        Kind(4, 4, 256): {16: (16, 8, 2)},
    },
    "gfx942": {
        Kind(2, 2, 64): {64: (64, 4, 1), 128: (64, 8, 1)},
        Kind(2, 2, 128): {64: (32, 4, 1), 128: (32, 8, 1)},
        Kind(2, 2, 256): {64: (32, 8, 1)},
    },
}


# Instead of _DECODE's, where programs are too few to hide each other's waiting for memory: one
# sequence took 7.5 us of an H100 for 8.9, 64 took longer.
_LONE_DECODE: _Table = {"sm_90": {Kind(2, 2, 128): {16: (64, 4, 3)}}}
# Instead of _PREFILL's, where the keys of chunks are split and neither window, cap nor distance
# takes registers: a processor holds two programs, of which one computes while the other multiplies.
_SPLIT_PREFILL: _Table = {"sm_90": {Kind(2, 2, 128): {128: (32, 4, 3)}}}
_KERNELS = {"decode": _DECODE, "prefill": _PREFILL}


@contextmanager
def trying(kernel: str, arch: str, kind: Kind, tile: Tile) -> Iterator[None]:
    """Within it "decode" or "prefill" launches of up to this many rows take this tile.

    For measuring what belongs into the tables above.
    """
    table = _KERNELS[kernel][arch]
    before = table[kind]
    table[kind] = dict(sorted({**before, tile.rows: tile[1:]}.items()))
    special = [one.get(arch, {}) for one in (_LONE_DECODE, _SPLIT_PREFILL)]
    kept = [one.pop(kind, None) for one in special]  # else they would be taken in its place
    try:
        yield
    finally:
        table[kind] = before
        for one, rows in zip(special, kept, strict=True):
            if rows is not None:
                one[kind] = rows


def pad_power(size: int, least: int = 16) -> int:
    """The power of two that holds `size`."""
    return max(least, 1 << (size - 1).bit_length())


def heads_a_program(group: int, most: int) -> int:
    """The largest divisor of `group` that is at most `most`."""
    return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def _rows_of(table: _Table, arch: str, kind: Kind) -> _Rows:
    if kind not in table[arch]:
        sizes = f"queries of {kind.query_bytes} bytes over a cache of {kind.cache_bytes}"
        raise ValueError(
            f"no attention kernel on {arch} for {sizes}, heads of {kind.head_dim}; "
            f"there are {list(map(tuple, table[arch]))}"
        )
    return table[arch][kind]


def _entry(by_rows: _Rows, rows: int) -> Tile:
    held = next((r for r in by_rows if r >= rows), max(by_rows))
    return Tile(min(rows, held), *by_rows[held])


def reads_fp8(arch: str) -> bool:
    """Whether there are kernels for a cache of 8-bit floats."""
    return any(kind.cache_bytes == 1 for kind in _DECODE[arch])


def most_decode_rows(arch: str, kind: Kind) -> int:
    return max(_rows_of(_DECODE, arch, kind))


def decode_tile(arch: str, kind: Kind, rows: int, *, is_lone: bool = False) -> Tile:
    """For `rows` packed query rows of one sequence, a power of two; is_lone: with few others."""
    lone = _LONE_DECODE.get(arch, {}).get(kind, {})
    if is_lone and rows in lone:
        return Tile(rows, *lone[rows])
    return _entry(_rows_of(_DECODE, arch, kind), rows)


def is_lone(arch: str, num_programs: int) -> bool:
    """Whether decodes of this many sequences times blocks of heads leave a device without work."""
    return num_programs < PROGRAMS_A_PROCESSOR * PROCESSORS[arch]


def prefill_tile(arch: str, kind: Kind, longest: int, *, is_fixed: bool) -> Tile:
    """For sequences of up to `longest` packed query rows; is_fixed: whatever they are."""
    wanted = MAX_PREFILL_ROWS if is_fixed else min(pad_power(longest), MAX_PREFILL_ROWS)
    return _entry(_rows_of(_PREFILL, arch, kind), wanted)


def split_tile(arch: str, kind: Kind, tile: Tile) -> Tile:
    """Instead of `tile`, of as many rows, where the keys are split."""
    rows = _SPLIT_PREFILL.get(arch, {}).get(kind, {})
    return Tile(tile.rows, *rows[tile.rows]) if tile.rows in rows else tile


def decode_shares(arch: str, num_programs: int, num_blocks: int, max_seq_len: int) -> Shares | None:
    """For `num_programs` sequences times blocks of heads, `num_blocks` of these. None: each
    sequence is read by one program for each block.

    Few programs share what there is among all processors. Many need not, unless one sequence is
    much longer than the others: all would wait for the one program that walks through it.
    """
    processors = PROCESSORS[arch]
    if is_lone(arch, num_programs):
        num, least = PROGRAMS_A_PROCESSOR * processors, LEAST_SHARE_KEYS
    elif max_seq_len <= MOST_UNPLANNED_KEYS:
        return None
    else:
        num, least = FULL_PROGRAMS_A_PROCESSOR * processors, LEAST_FULL_SHARE_KEYS
    return Shares(max(1, num // num_blocks), least)


def prefill_splits(
    arch: str, tile: Tile, num_programs: int, max_seq_len: int, *, is_fixed: bool
) -> Splits:
    """For `num_programs` items of work times blocks of heads. A processor holds one program of
    eight warps, or two of four."""
    wanted = max(1, 8 // tile.warps) * PROCESSORS[arch] // max(num_programs, 1)
    useful = max_seq_len // LEAST_PREFILL_KEYS
    if is_fixed or min(wanted, useful) < 2:
        return Splits(1, max_seq_len)
    return Splits(pad_power(min(wanted, useful, MAX_SPLITS), 1), LEAST_PREFILL_KEYS)


def write_heads(num_tokens: int, num_kv_heads: int) -> int:
    """Heads a program of the KV write: one where there are few tokens to fill the device with."""
    return 1 if num_tokens < 64 else min(8, pad_power(num_kv_heads, 1))


def write_warps(num_elements: int) -> int:
    """For this many elements a program."""
    return max(1, min(8, num_elements // 256))
