"""Processes that share an arena for KV blocks, and die: no bytes are wrong, nothing hangs, nothing
is left."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
from support.kv_rows import key_of, rows_of
from support.patience import WAIT_SECONDS
from support.processes import collect_garbage
from support.spawned import BlocksOfCores, fake_config

from engine.config.cache import CacheConfig
from engine.ipc.arena import NAME, ArenaFile
from engine.kv_transfer.host import HostStore, open_host_store
from engine.kv_transfer.stores import StoreIdentity
from engine.rpc.launch import start_cores

SEED = int(os.environ.get("METRONOME_SEED", random.randrange(10**6)))
SIZE = 50_000
MODEL = StoreIdentity("aa" * 32, SIZE)
NUM_KEYS = 40
WORKER = """
import os, random, signal, sys
import numpy as np
from engine.ipc.sealed_files import SealedFile
from engine.ipc.arena import Arena
from engine.kv_transfer.host import HostStore
from engine.kv_transfer.stores import StoreIdentity
from support.kv_rows import key_of, rows_of

namespace, *numbers = sys.argv[1:]
*handle, size, num_keys, seed, num_copies = map(int, numbers)
rng = random.Random(seed)

def copy(to, source):
    global num_copies
    num_copies -= 1
    half = to.shape[1] // 2
    to[:, :half] = source[:, :half]
    if num_copies == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    to[:, half:] = source[:, half:]

arena = Arena.shared(SealedFile(namespace, *handle))
store = HostStore(arena, StoreIdentity("aa" * 32, size), copy=copy)
right = rows_of(range(num_keys), size)
rows = np.zeros_like(right[:6])
num_served = 0
while True:
    some = rng.sample(range(num_keys), 6)
    keys = [key_of(each) for each in some]
    found = store.read(keys, rows)
    num_served += sum(found)
    assert (rows[found] == right[some][found]).all(), "wrong bytes"
    store.write(keys, right[some])
    print(num_served, store.counts()["from_others"], flush=True)
"""


def start(file: ArenaFile, seed: int, num_copies: int) -> subprocess.Popen[str]:
    """A process that reads and writes until it is killed. It kills itself in the middle of copy
    number ``num_copies``; never if this is 0."""
    arguments = map(str, (*file.handle, SIZE, NUM_KEYS, seed, num_copies))
    paths = os.pathsep.join(sys.path)
    return subprocess.Popen(
        [sys.executable, "-c", WORKER, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"},
    )


def next_line(process: subprocess.Popen[str]) -> list[int]:
    """How many blocks it has read, and how many of these from other regions."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return [int(word) for word in line.split()]


def shared_files() -> list[str]:
    """Memory for KV blocks that this process has open, or that has a name."""
    collect_garbage()
    files = []
    for each in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # that of the list itself
            files.append(os.readlink(f"/proc/self/fd/{each}"))
    files += Path("/proc/self/maps").read_text().splitlines()
    return [each for each in [*files, *os.listdir("/dev/shm")] if NAME in each]


def check_content(store: HostStore) -> int:
    """Returns how many blocks it serves, all of which must be right."""
    rows = np.zeros((NUM_KEYS, SIZE), np.uint8)
    found = store.read([key_of(each) for each in range(NUM_KEYS)], rows)
    assert (rows[found] == rows_of(range(NUM_KEYS), SIZE)[found]).all()
    return sum(found)


def test_processes_that_die_amid_copies_leave_no_wrong_bytes() -> None:
    """Processes read and write; some kill themselves in the middle of a copy, and others take
    their regions over."""
    print(f"METRONOME_SEED={SEED}")
    rng = random.Random(SEED)
    file = ArenaFile(2 * 14 * SIZE, 2)
    processes = [start(file, SEED, 0)]
    try:
        for turn in range(3):
            processes.append(start(file, SEED + turn + 1, rng.randint(5, 40)))
            assert processes[-1].wait() == -signal.SIGKILL
        while next_line(processes[0])[1] < 20:
            pass
    finally:
        for each in processes:
            each.kill()
            each.communicate()
    store = open_host_store(0, MODEL, file.handle)
    assert check_content(store) > 10
    store.close()
    file.close()
    del store
    assert not shared_files()


def test_a_core_that_is_started_again_has_its_blocks_and_those_of_others(tmp_path: Path) -> None:
    config = fake_config(multiprocess=True, data_parallel_size=2, on_core_death="restart")
    config = replace(config, cache=CacheConfig(kv_offloading_size=0.01))
    client = start_cores(config, BlocksOfCores(folder=str(tmp_path)))
    try:
        first, second = client.pids
        os.kill(first, signal.SIGKILL)
        until = time.monotonic() + WAIT_SECONDS
        while first in client.pids or len(client.pids) < 2:
            client.step()
            assert time.monotonic() < until
        (again,) = set(client.pids) - {second}
        assert (tmp_path / str(again)).read_text() == "True True"
    finally:
        client.shutdown()
    assert not shared_files()
