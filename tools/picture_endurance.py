"""Sends many pictures to a core in a process of its own, and shows what is left open of them.

    python tools/picture_endurance.py [--images 10000] [--transport cuda_ipc_pool] [--processes 1]

The model is tiny and random. Each picture is new, or one of the last few; some requests are
aborted, some files are damaged. A line per tenth of the pictures, when all requests have ended,
shows all processes: open files, those of shared memory among them with their bytes, the bytes of
shared memory that are mapped, and resident memory. With a ``cuda_ipc`` transport, both use a
made-up device, whose bytes are shown too. The front end keeps processed pictures up to a small
bound, and drops them before the last line. The exit status is 1 if something grows after the first
line.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import time
from collections import deque
from contextlib import ExitStack
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

import numpy as np  # noqa: E402
from e2e.seeing_models import make_seeing_model  # noqa: E402
from PIL import Image  # noqa: E402
from support.fake_device_core import llm_with_fake_device  # noqa: E402
from support.fake_ipc import FakeDevice  # noqa: E402

from engine import LLM, LLMEngine, SamplingParams  # noqa: E402
from engine.ipc.pixel_segments import NAME  # noqa: E402
from engine.rpc.zmq_client import EngineCoreClient  # noqa: E402

SIZE = 120  # pixels of a side
NUM_IN_FLIGHT = 24
NUM_KNOWN = 8  # pictures that come again
AGAIN, ABORTED, DAMAGED = 0.2, 0.1, 0.02  # shares
MOST_UNREAD = 8  # pictures that were being processed when their requests were aborted
CACHE_GB = 0.002  # full after a few hundred pictures
SEGMENT_BYTES = 1 << 14  # at most, for a picture
MOST_GROWTH_MIB = 16.0  # in resident memory, after the first tenth
PARAMS = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True, detokenize=False)


class Held(NamedTuple):
    """What a process holds."""

    num_files: int
    num_segments: int  # open files of pixels
    segment_bytes: int
    mapped_bytes: int  # pixels
    rss_mib: float


def held_by(pids: list[int]) -> Held:
    """What these processes hold together."""
    return Held(*map(sum, zip(*map(held_by_one, pids), strict=True)))


def held_by_one(pid: int) -> Held:
    folder = Path(f"/proc/{pid}/fd")
    files = [each for each in folder.iterdir() if each.is_symlink()]
    segments = [each for each in files if os.readlink(each).startswith(f"/memfd:{NAME}")]
    mapped = resident = 0
    is_of_pixels = False
    for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
        head, _, rest = line.partition(" ")
        if not head.endswith(":"):
            is_of_pixels = NAME in rest
        elif head == "Size:" and is_of_pixels:
            mapped += 1024 * int(rest.split()[0])
        elif head == "Rss:":
            resident += int(rest.split()[0])
    sizes = sum(each.stat().st_size for each in segments)
    return Held(len(files), len(segments), sizes, mapped, resident / 1024)


class Load:
    """Requests with pictures, of which a number is in flight."""

    def __init__(self, engine: LLMEngine, rng: random.Random) -> None:
        self.engine, self.rng = engine, rng
        self.dice = np.random.default_rng(rng.randrange(1 << 30))
        self.known: deque[bytes] = deque(maxlen=NUM_KNOWN)
        self.num_sent = 0
        self.ends: dict[str, int] = {}

    def picture(self) -> bytes:
        if self.known and self.rng.random() < AGAIN:
            return self.rng.choice(self.known)
        file = BytesIO()
        values = self.dice.integers(0, 256, (SIZE, SIZE, 3), dtype=np.uint8)
        Image.fromarray(values).save(file, "BMP")
        data = file.getvalue()
        if self.rng.random() < DAMAGED:
            return data[: len(data) // 2]
        self.known.append(data)
        return data

    def run(self, number: int) -> None:
        """Send a number of pictures, and wait for all ends."""
        last = self.num_sent + number
        while self.num_sent < last or self.engine.has_unfinished_requests():
            room = NUM_IN_FLIGHT - self.engine.get_num_unfinished_requests()
            for _ in range(min(room, last - self.num_sent)):
                name = str(self.num_sent)
                prompt = {"prompt": "a <image>", "multi_modal_data": {"image": self.picture()}}
                self.engine.add_request(name, prompt, PARAMS)
                self.num_sent += 1
                if self.rng.random() < ABORTED:
                    self.engine.abort_request(name)
            for output in self.engine.step():
                if output.finished:
                    reason = str(output.outputs[0].finish_reason)
                    self.ends[reason] = self.ends.get(reason, 0) + 1


def head(names: list[str]) -> str:
    columns = (
        f" | {name:>9.9}: {'files':>5} {'memfd':>5} {'KiB':>7} {'mapped':>7} {'RSS MiB':>8}"
        for name in names
    )
    return f"{'images':>7} {'/s':>5}" + "".join(columns)


def processes(core: int) -> dict[str, list[int]]:
    """The ids of this process, of the core and of text processes."""
    tasks = Path(f"/proc/{os.getpid()}/task").glob("*/children")
    others = {int(pid) for task in tasks for pid in task.read_text().split()} - {core}
    found = {"front end": [os.getpid()], "core": [core]}
    return found | ({"texts": sorted(others)} if others else {})


def row(number: int, rate: float, held: list[Held]) -> str:
    parts = [
        f" | {'':>9}  {each.num_files:5} {each.num_segments:5} {each.segment_bytes // 1024:7} "
        f"{each.mapped_bytes // 1024:7} {each.rss_mib:8.1f}"
        for each in held
    ]
    return f"{number:7} {rate:5.0f}" + "".join(parts)


def growth(names: list[str], before: list[Held], after: list[Held]) -> list[str]:
    """What has grown between two times at which no request was unfinished."""
    found = []
    for name, old, new in zip(names, before, after, strict=True):
        if new.num_files > old.num_files + MOST_UNREAD:
            found.append(f"{name}: {old.num_files} -> {new.num_files} open files")
        if (
            new.segment_bytes > CACHE_GB * (1 << 30) + MOST_UNREAD * SEGMENT_BYTES
            or new.mapped_bytes
        ):
            found.append(f"{name}: {new.segment_bytes} bytes shared, {new.mapped_bytes} mapped")
        if new.rss_mib > old.rss_mib + MOST_GROWTH_MIB:
            found.append(f"{name}: resident memory {old.rss_mib:.0f} -> {new.rss_mib:.0f} MiB")
    return found


def endure(llm: LLM, num_images: int, seed: int, device: FakeDevice | None) -> list[str]:
    """Send the pictures and print the table. Returns what has grown."""
    engine = llm.llm_engine
    load = Load(engine, random.Random(seed))
    client = engine.session.client
    assert isinstance(client, EngineCoreClient)
    found = processes(*client.pids)
    names, pids = list(found), list(found.values())
    print(head(names), flush=True)
    rows: list[list[Held]] = []
    for _ in range(10):
        began = time.monotonic()
        load.run(num_images // 10)
        rows.append([held_by(each) for each in pids])
        rate = num_images // 10 / (time.monotonic() - began)
        text = row(load.num_sent, rate, rows[-1])
        if device is not None:
            size = sum(len(block.memory) for block in device.blocks)
            text += f" | device: {len(device.blocks)} blocks, {size // 1024} KiB"
        print(text, flush=True)
    engine.reset_mm_cache()
    rows.append([held_by(each) for each in pids])
    print(row(load.num_sent, 0.0, rows[-1]), "after reset_mm_cache")
    stats = engine.stats()
    assert stats is not None
    print("ends:", load.ends)
    shown = ("pixels.", "encoder.")
    print("counters:", {k: v for k, v in stats.counters.items() if k.startswith(shown)})
    grown = growth(names, rows[0], rows[-2])
    grown += [
        f"{each.num_segments} segments are left"
        for each in rows[-1]
        if each.num_segments > MOST_UNREAD
    ]
    return grown + ([] if device is None else device.faults)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--images", type=int, default=10_000)
    choices = ["default", "cuda_ipc", "cuda_ipc_pool"]
    parser.add_argument("--transport", choices=choices, default="default")
    parser.add_argument("--processes", type=int, default=0, help="text processes")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parsed = parser.parse_args()
    print(f"METRONOME_SEED={parsed.seed}, {parsed.transport}")
    options: dict[str, Any] = {
        "num_threads": 1,
        "max_num_seqs": 16,
        "num_kv_blocks": 400,
        "log_level": "error",
        "mm_tensor_transport": parsed.transport,
        "mm_tensor_pool_mib": 1,
        "tokenizer_pool_size": parsed.processes,
        "mm_processor_cache_gb": CACHE_GB,
    }
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        model = make_seeing_model(Path(folder) / "llava", "llava")
        device = None
        if parsed.transport == "default":
            llm = stack.enter_context(LLM(model, multiprocess=True, **options))
        else:
            device = FakeDevice(Path(folder))
            llm = stack.enter_context(llm_with_fake_device(model, device, **options))
        found = endure(llm, parsed.images, parsed.seed, device)
    print("\n".join(found) or "nothing has grown")
    sys.exit(bool(found))


if __name__ == "__main__":
    main()
