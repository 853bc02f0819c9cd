"""Launch settings of the Triton attention kernels, in tables that are read before each launch.

There is no autotuner: it cannot run during graph capture, and two runs of a program could use
different kernels and so differ in the last bits. Measured settings are entered by hand.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

# Processors (SMs) of the largest device of an architecture.
PROCESSORS = {"sm_90": 132, "sm_80": 108, "gfx942": 304}
MAX_SPLITS = 32
# Minimum number of keys of a share, in batches that do not fill the device, and in those that do.
LEAST_SHARE_KEYS, LEAST_FULL_SHARE_KEYS = 128, 1024
# Number of shares per processor, in these two cases.
PROGRAMS_A_PROCESSOR, FULL_PROGRAMS_A_PROCESSOR = 2, 6
# In batches that fill the device, sequences up to this length are not split.
MOST_UNPLANNED_KEYS = 8192
# Minimum number of keys of a part in prefill, since its float32 sums go through memory once more.
LEAST_PREFILL_KEYS = 512
# Sequences of up to this many query tokens are split like decodes.
MAX_DECODE_TOKENS = 8
MAX_PREFILL_ROWS = 128
# Query rows times parts of keys for which a recorded mixed step has memory.
MOST_PART_ROWS = 4096


class Tile(NamedTuple):
    """Launch settings of an attention program: rows (query tokens x heads) and keys of its tile,
    warps and pipeline stages."""

    rows: int
    keys: int
    warps: int
    stages: int


class Kind(NamedTuple):
    """Key of the tuning tables: bytes of a query and of a cache element, and padded head size."""

    query_bytes: int
    cache_bytes: int
    head_dim: int  # at least 64; smaller heads use its settings


class Shares(NamedTuple):
    """How to split the keys of all sequences together: into ``num`` equal shares of at least
    ``least_keys`` keys."""

    num: int
    least_keys: int

    def most_items(self, num_seqs: int) -> int:
        """Returns the maximum number of work items for ``num_seqs`` sequences: a share with keys of
        several sequences is divided into one item per sequence."""
        return self.num + num_seqs

    def most_slots(self, num_seqs: int) -> int:
        """Returns the maximum number of work items that have only a part of a sequence's keys."""
        return self.most_items(min(num_seqs, self.num))


class Splits(NamedTuple):
    """How to split the keys of each sequence: into at most ``num`` parts of at least ``least_keys``
    keys."""

    num: int
    least_keys: int


# Query rows per program -> (keys, warps, stages); the first entry with enough rows is used.
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


# Replaces entries of _DECODE if there are too few programs to hide memory latency: one sequence
# took 7.5 us instead of 8.9 on an H100, 64 sequences took longer.
_LONE_DECODE: _Table = {"sm_90": {Kind(2, 2, 128): {16: (64, 4, 3)}}}
# Replaces entries of _PREFILL if keys of chunks are split and there is no window, softcap or ALiBi,
# which take registers: a processor then runs two programs, one of which does scalar work while the
# other uses the tensor cores.
_SPLIT_PREFILL: _Table = {"sm_90": {Kind(2, 2, 128): {128: (32, 4, 3)}}}
_KERNELS = {"decode": _DECODE, "prefill": _PREFILL}


@contextmanager
def trying(kernel: str, arch: str, kind: Kind, tile: Tile) -> Iterator[None]:
    """Context in which launches of ``kernel`` ("decode" or "prefill") with up to ``tile.rows`` rows
    use this tile, so that it can be measured."""
    table = _KERNELS[kernel][arch]
    before = table[kind]
    table[kind] = dict(sorted({**before, tile.rows: tile[1:]}.items()))
    special = [one.get(arch, {}) for one in (_LONE_DECODE, _SPLIT_PREFILL)]
    kept = [one.pop(kind, None) for one in special]  # they would take precedence
    try:
        yield
    finally:
        table[kind] = before
        for one, rows in zip(special, kept, strict=True):
            if rows is not None:
                one[kind] = rows


def pad_power(size: int, least: int = 16) -> int:
    """The smallest power of two that is at least `size` and `least`."""
    return max(least, 1 << (size - 1).bit_length())


def heads_a_program(group: int, most: int) -> int:
    """Returns the query heads per program: the largest divisor of `group` up to `most`."""
    return next(heads for heads in range(min(group, most), 0, -1) if group % heads == 0)


def _rows_of(table: _Table, arch: str, kind: Kind) -> _Rows:
    if kind not in table[arch]:
        sizes = f"queries of {kind.query_bytes} bytes over a cache of {kind.cache_bytes}"
        raise ValueError(
            f"no attention kernel on {arch} for {sizes} and heads of size {kind.head_dim}; (query "
            f"bytes, cache bytes, head size) must be one of {list(map(tuple, table[arch]))}"
        )
    return table[arch][kind]


def _entry(by_rows: _Rows, rows: int) -> Tile:
    held = next((r for r in by_rows if r >= rows), max(by_rows))
    return Tile(min(rows, held), *by_rows[held])


def reads_fp8(arch: str) -> bool:
    """True if this architecture has kernels for a KV cache of 8-bit floats."""
    return any(kind.cache_bytes == 1 for kind in _DECODE[arch])


def most_decode_rows(arch: str, kind: Kind) -> int:
    return max(_rows_of(_DECODE, arch, kind))


def decode_tile(arch: str, kind: Kind, rows: int, *, is_lone: bool = False) -> Tile:
    """Returns the decode tile for `rows` rows (query tokens x heads, padded to a power of two).
    is_lone: the batch does not fill the device."""
    lone = _LONE_DECODE.get(arch, {}).get(kind, {})
    if is_lone and rows in lone:
        return Tile(rows, *lone[rows])
    return _entry(_rows_of(_DECODE, arch, kind), rows)


def is_lone(arch: str, num_programs: int) -> bool:
    """True if this many decode programs (sequences x blocks of heads) do not fill the device."""
    return num_programs < PROGRAMS_A_PROCESSOR * PROCESSORS[arch]


def prefill_tile(arch: str, kind: Kind, longest: int, *, is_fixed: bool) -> Tile:
    """Returns the prefill tile for sequences of up to `longest` rows (query tokens x heads).
    is_fixed: the tile must not depend on `longest`."""
    wanted = MAX_PREFILL_ROWS if is_fixed else min(pad_power(longest), MAX_PREFILL_ROWS)
    return _entry(_rows_of(_PREFILL, arch, kind), wanted)


def split_tile(arch: str, kind: Kind, tile: Tile) -> Tile:
    """Returns the prefill tile to use if keys are split; it has as many rows as `tile`."""
    rows = _SPLIT_PREFILL.get(arch, {}).get(kind, {})
    return Tile(tile.rows, *rows[tile.rows]) if tile.rows in rows else tile


def decode_shares(arch: str, num_programs: int, num_blocks: int, max_seq_len: int) -> Shares | None:
    """Returns how to split keys in decode attention, for `num_programs` programs (sequences x
    `num_blocks` blocks of heads); ``None``: one program reads all keys of its sequence.

    If programs are too few to fill the device, all keys are shared among all processors. Otherwise
    only long sequences are split, so that no program takes much longer than the others.
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
    """Returns how to split the keys of prompt chunks for `num_programs` programs (work items x
    blocks of heads). is_fixed: do not split, so that results do not depend on the batch."""
    # A processor runs one program of eight warps, or two of four.
    wanted = max(1, 8 // tile.warps) * PROCESSORS[arch] // max(num_programs, 1)
    useful = max_seq_len // LEAST_PREFILL_KEYS
    if is_fixed or min(wanted, useful) < 2:
        return Splits(1, max_seq_len)
    return Splits(pad_power(min(wanted, useful, MAX_SPLITS), 1), LEAST_PREFILL_KEYS)


def write_heads(num_tokens: int, num_kv_heads: int) -> int:
    """Returns the heads per program of the KV write: one if tokens are few, to fill the device."""
    return 1 if num_tokens < 64 else min(8, pad_power(num_kv_heads, 1))


def write_warps(num_elements: int) -> int:
    """Returns the number of warps for a program that writes this many elements to the KV cache."""
    return max(1, min(8, num_elements // 256))
