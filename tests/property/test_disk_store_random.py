"""The disk tier under random operations, damage and kills has what was stored, or misses it."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
from support import disk_programs
from support.disk_blocks import (
    BLOCK_BYTES,
    bytes_in,
    get,
    has,
    key_of,
    opened,
    put,
    rows_of,
    segments_in,
)
from support.patience import WAIT_SECONDS

from engine.kv_transfer.disk import DiskStore

PROGRAM = disk_programs.__file__
ENVIRONMENT = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def numbers_of(draw: random.Random, most: int) -> list[int]:
    start = draw.randrange(most)
    numbers = list(range(start, min(most, start + draw.randrange(1, 30))))
    if draw.random() < 0.3:
        draw.shuffle(numbers)
    return numbers if draw.random() < 0.7 else numbers[:: draw.randrange(1, 4)]


def check(store: DiskStore, numbers: list[int], model: dict[int, int]) -> list[bool]:
    """Which of the blocks the store supplies. None has other bytes than the model's."""
    keys = [key_of(number) for number in numbers]
    rows = np.zeros((len(keys), BLOCK_BYTES), np.uint8)
    found = store.read(keys, rows)
    for number, key, row, is_found in zip(numbers, keys, rows, found, strict=True):
        if is_found:
            assert (row == rows_of([key], model[number])[0]).all()
    return found


def test_stores_of_one_directory_are_like_a_dict(tmp_path: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "kv"
    stores = [opened(path), opened(path)]
    model: dict[int, int] = {}
    version = 0
    for _ in range(250):
        which = draw.randrange(2)
        store, numbers = stores[which], numbers_of(draw, 200)
        keys = [key_of(number) for number in numbers]
        event = draw.random()
        if event < 0.1:
            store.close()
            store = stores[which] = opened(path)
        if draw.random() < 0.6:
            store.refresh()
            expected = [number in model for number in numbers]
            assert store.contains(keys) == expected == check(store, numbers, model)
        else:
            check(store, numbers, model)
        if 0.2 < event < 0.6:
            store.refresh()
            version += 1
            new = [number for number in dict.fromkeys(numbers) if number not in model]
            kept = store.write(keys, rows_of(keys, version))
            assert all(kept)
            model.update(dict.fromkeys(new, version))
        elif 0.6 < event < 0.8:
            store.forget(keys)
            for number in numbers:
                model.pop(number, None)
        elif 0.8 < event < 0.82:
            store.clear()
            model.clear()
    for store in stores:
        counts = store.counts()
        assert counts["damaged"] == counts["errors"] == counts["evicted"] == 0
        store.close()


def test_damage_and_eviction_lose_blocks_and_never_change_them(tmp_path: Path, seed: int) -> None:
    draw, path = random.Random(seed), tmp_path / "kv"
    most = draw.randrange(300_000, 900_000)
    stores = [opened(path, most), opened(path, most)]
    version = dict.fromkeys(range(1500), 0)
    num_found = num_damaged = 0
    for _ in range(300):
        which = draw.randrange(2)
        store, numbers = stores[which], numbers_of(draw, 1500)
        event = draw.random()
        if event < 0.05:
            num_damaged += store.counts()["damaged"]
            store.close()
            store = stores[which] = opened(path, most)
        elif event < 0.15 and (files := segments_in(path)):
            file = draw.choice(files)
            with file.open("r+b") as damaged:
                if event < 0.08:
                    damaged.truncate(draw.randrange(file.stat().st_size))
                else:
                    place = draw.randrange(file.stat().st_size)
                    damaged.seek(place)
                    byte = damaged.read(1)
                    damaged.seek(place)
                    damaged.write(bytes([byte[0] ^ draw.randrange(1, 256)]))
        elif event < 0.2:
            store.forget([key_of(number) for number in numbers])
            for number in numbers:
                version[number] += 1
        elif event < 0.6:
            keys = [key_of(number) for number in numbers]
            rows = [rows_of([key], version[n])[0] for key, n in zip(keys, numbers, strict=True)]
            store.write(keys, np.stack(rows))
        num_found += sum(check(store, numbers, version))
        assert bytes_in(path) <= most
    for store in stores:
        num_damaged += store.counts()["damaged"]
        store.close()
    assert num_found > 100 and num_damaged


def after(count: int) -> dict[int, int]:
    """Versions of the blocks that there are after some operations, if nothing was removed."""
    model = dict.fromkeys(disk_programs.FULL, 0)
    for kind, numbers, version in disk_programs.OPERATIONS[:count]:
        if kind == "clear":
            model.clear()
        for number in numbers:
            if kind == "forget":
                model.pop(number, None)
            else:
                model.setdefault(number, version)
    return model


def test_a_crash_in_any_call_leaves_a_store_that_works(tmp_path: Path) -> None:
    disk_programs.fill(tmp_path / "full")
    subprocess.run(
        [sys.executable, PROGRAM, "crash", tmp_path], env=ENVIRONMENT, check=True, timeout=300
    )
    logs = sorted(tmp_path.glob("*.log"))
    assert len(logs) > 20
    for log in logs:
        num_done, path = log.stat().st_size, log.with_suffix("")
        before, then = after(num_done), after(num_done + 1)
        store = opened(path, disk_programs.TIGHT)
        for number in {*before, *then}:
            key, row = key_of(number), np.zeros((1, BLOCK_BYTES), np.uint8)
            is_found = store.read([key], row) == [True]
            versions = {model.get(number) for model in (before, then)}
            if is_found:
                assert any((row == rows_of([key], v)).all() for v in versions if v is not None)
            elif number >= disk_programs.OLDEST or (number in (0, 2, 3) and num_done):
                assert None in versions, (log, number)
        for number in {*disk_programs.FULL, *range(600, 610)} - {*before, *then}:
            assert not any(has(store, [number]))
        assert all(put(store, range(1000, 1020))) and all(get(store, range(1000, 1020)))
        assert bytes_in(path) <= disk_programs.TIGHT
        store.close()


def test_processes_share_a_directory_and_are_killed(tmp_path: Path, seed: int) -> None:
    draw, path, most = random.Random(seed), tmp_path / "kv", disk_programs.TIGHT
    store, num_found = opened(path, most), 0
    for turn in range(2):
        arguments = ["write", str(path), str(seed + turn), str(most)]
        command = [sys.executable, PROGRAM, *arguments]
        writers = [
            subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE) for _ in range(2)
        ]
        try:
            for each in writers:
                assert each.stdout and each.stdout.readline()
            end = time.monotonic() + draw.uniform(0.1, 0.4)
            while time.monotonic() < end:
                assert bytes_in(path) <= most
                store.refresh()
                num_found += sum(get(store, range(5000)))
                put(store, numbers_of(draw, 5000))
        finally:
            for each in writers:
                each.send_signal(signal.SIGKILL)
                each.wait(WAIT_SECONDS)
                assert each.stdout
                each.stdout.close()
        assert [each.returncode for each in writers] == [-signal.SIGKILL] * 2
        store.close()
        store = opened(path, most)
        assert store.counts()["num_blocks"] > 50
        num_found += sum(get(store, range(5000)))
    assert num_found > 300
    store.close()
