"""Measures how long it takes to read KV blocks of another process on this machine.

    python benchmarks/kv_peers.py [--tokens 2000] [--block-bytes 393216] [--rounds 20] [--json FILE]

A block has the KV of 16 tokens; 393,216 bytes are 12 layers with 256 keys and values in float32.
Each way is measured in turn: shared memory, messages through a socket file, messages over encrypted
TCP, and Mooncake over TCP if it is installed. The first read includes the connection. The content
of each read is compared with what it must be.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import machine
import numpy as np
from figures import keep, print_table

from engine.errors import ConfigError
from engine.ipc.address import tcp_address
from engine.kv_transfer.peers.mooncake import MooncakeTransport
from engine.kv_transfer.peers.peer_store import PeerStore
from engine.kv_transfer.peers.server import BlockServer
from engine.kv_transfer.peers.transports import Transport
from engine.kv_transfer.stores import Rows, StoreIdentity

BLOCK_TOKENS = 16
SECRET = "the secret of two processes of a benchmark"
WAYS = ("shared memory", "socket file", "encrypted TCP", "Mooncake")


class Blocks:
    """All blocks of a producer: the key of each is its number."""

    def __init__(self, num_blocks: int, block_bytes: int) -> None:
        rng = np.random.default_rng(0)
        self.rows = rng.integers(0, 256, (num_blocks, block_bytes), dtype=np.uint8)
        self.keys = [b"%d" % number for number in range(num_blocks)]

    def contains(self, keys: Sequence[bytes]) -> list[bool]:
        return [True] * len(keys)

    def read(self, keys: Sequence[bytes], rows: Rows) -> list[bool]:
        for key, row in zip(keys, rows, strict=True):
            row[:] = self.rows[int(key)]
        return [True] * len(keys)


def transport_of(way: str) -> Transport | None:
    return MooncakeTransport("127.0.0.1") if way == "Mooncake" else None


def produce(way: str, num_blocks: int, block_bytes: int, port: int) -> None:
    """Serve blocks until the input ends."""
    server = BlockServer(
        Blocks(num_blocks, block_bytes),
        StoreIdentity("benchmark", block_bytes),
        tcp_address(f"tcp://127.0.0.1:{port}", SECRET) if way == "encrypted TCP" else None,
        transport=transport_of(way),
    )
    print(server.address, flush=True)
    sys.stdin.read()
    server.close()


def measured(way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Milliseconds of the first read, of the median and of the fastest of the others."""
    transport = transport_of(way)
    num_blocks = -(-args.tokens // BLOCK_TOKENS)
    command = (way, num_blocks, args.block_bytes, args.port)
    child = subprocess.Popen(
        [sys.executable, __file__, "--produce", *map(str, command)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert child.stdout is not None
    address = child.stdout.readline().strip()
    blocks = Blocks(num_blocks, args.block_bytes)
    store = PeerStore(
        StoreIdentity("benchmark", args.block_bytes),
        secret=SECRET,
        shares_memory=way == "shared memory",
        transport=transport,
    )
    rows, seconds = np.zeros_like(blocks.rows), []
    for _ in range(args.rounds + 1):
        rows[:] = 0
        store.announce(address, blocks.keys)
        began = time.perf_counter()
        found = store.read(blocks.keys, rows)
        seconds.append(time.perf_counter() - began)
        if not all(found) or not np.array_equal(rows, blocks.rows):
            raise RuntimeError(f"blocks by {way} are missing or wrong: {store.counts()}")
    store.close()
    child.communicate()
    first, *others = (1e3 * each for each in seconds)
    return {"first_ms": first, "median_ms": statistics.median(others), "best_ms": min(others)}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--tokens", type=int, default=2000)
    parser.add_argument("--block-bytes", type=int, default=393_216)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--port", type=int, default=47_311, help="for the way over TCP")
    parser.add_argument("--json", type=Path, help="keep the figures here")
    args = parser.parse_args()
    ways: dict[str, dict[str, Any]] = {}
    for way in WAYS:
        try:
            ways[way] = measured(way, args)
        except ConfigError as error:
            print(f"{way} is left out: {error}")
    size = -(-args.tokens // BLOCK_TOKENS) * args.block_bytes
    rows = [
        (way, *(f"{each[key]:.1f}" for key in each), f"{size / each['median_ms'] / 1e6:.2f}")
        for way, each in ways.items()
    ]
    title = f"{args.tokens} tokens, {size / 1e6:.1f} MB, {machine.describe()['cpu']}"
    print_table(title, ("", "first ms", "median ms", "best ms", "GB/s"), rows)
    keep(args.json, tokens=args.tokens, block_bytes=args.block_bytes, ways=ways)
    return 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--produce"]:
        produce(sys.argv[2], *map(int, sys.argv[3:]))
        sys.exit(0)
    sys.exit(main())
