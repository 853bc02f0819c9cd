"""Counts the files of `engine` in which a function body runs, for three journeys through it.

    step       a decode and a chunk of a prompt, planned and settled, and the rank that the default
               policy gives to a request
    abort      a task is cancelled while it reads a stream, the core in a process of its own; until
               both processes know it
    generate   `LLM.generate` to the first token, everything in this process

    python tools/journeys.py [--files] [--json FILE]
    cd OTHER && PYTHONPATH=OTHER python .../tools/journeys.py      # those of another checkout

It tells how many files one must have open to follow what happens. Code of modules and of classes
does not count, nor do compiled kernels; of the first two journeys the worker does not either.
A journey is taken several times, and what counts runs in each of them. The stream that is cancelled
is paused, so that no step computes meanwhile: functions that run while it only waits do not count.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib
import inspect
import json
import mmap
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

TIMES = 3  # that a journey is taken
IDLE = 100  # rounds with this number or more are idle
IDLE_SECONDS = 0.6  # without a request, during which calls are recorded, too
QUIET_SECONDS = 0.3  # after cancelling a task: by then both processes have noticed
SHARED = "METRONOME_JOURNEYS"  # the environment variable with the folder that processes share
WORKER = ("worker/", "sample/", "models/", "layers/")  # not counted where a core gets a message
COMPREHENSIONS = ("<listcomp>", "<setcomp>", "<dictcomp>", "<genexpr>")
BUDGET = 64  # tokens a step, in the scheduler of the first journey


class Recorder:
    """Notes the files whose functions begin to run in this process while the switch is on.

    The switch is a byte of a file that processes share: 0 for off, else the number of the round
    under way. What is noted goes into another file there: a line with round, file and function.
    """

    def __init__(self, folder: Path) -> None:
        with open(folder / "switch", "r+b") as file:
            self._switch = mmap.mmap(file.fileno(), 1)
        self._notes = os.open(folder / "notes", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._name_of: dict[CodeType, str | None] = {}
        self._noted: set[tuple[int, str]] = set()

    def install(self) -> None:
        """Record calls of this thread and of all that are started after it."""
        threading.setprofile(self._look)
        sys.setprofile(self._look)

    @contextlib.contextmanager
    def on(self, number: int) -> Iterator[None]:
        self._switch[0] = number
        try:
            yield
        finally:
            self._switch[0] = 0

    def _look(self, frame: FrameType, event: str, arg: Any) -> None:
        if event != "call" or not (number := self._switch[0]):
            return
        code = frame.f_code
        if code not in self._name_of:
            self._name_of[code] = name_of(code)
        name = self._name_of[code]
        if name is not None and (number, name) not in self._noted:
            self._noted.add((number, name))
            os.write(self._notes, f"{number} {name}\n".encode())


def name_of(code: CodeType) -> str | None:
    """File under `engine` and name of a function; ``None`` for what is none, or is elsewhere."""
    _, found, inside = code.co_filename.rpartition(f"{os.sep}engine{os.sep}")
    if not found or not code.co_flags & inspect.CO_OPTIMIZED:  # which bodies of classes are not
        return None
    if code.co_name in COMPREHENSIONS and not code.co_qualname.endswith(f"<locals>.{code.co_name}"):
        return None  # of a module or a class
    return f"{inside} {code.co_qualname}"


def files_of(notes: Iterable[str]) -> list[str]:
    """The files of functions that ran in every round, and in none in which nothing happened."""
    rounds: dict[int, set[str]] = {}
    for line in notes:
        number, _, name = line.strip().partition(" ")
        rounds.setdefault(int(number), set()).add(name)
    idle = set[str]().union(*(names for number, names in rounds.items() if number >= IDLE))
    taken = [names for number, names in rounds.items() if number < IDLE]
    return sorted({name.partition(" ")[0] for name in set.intersection(*taken) - idle})


def first_of(*places: str) -> Any:
    """The object of this name (`module:name`) in this tree; modules move."""
    for place in places:
        module, _, name = place.partition(":")
        with contextlib.suppress(ImportError, AttributeError):
            return getattr(importlib.import_module(module), name)
    raise SystemExit(f"none of {', '.join(places)} is there: tell tools/journeys.py where it went")


def step(recorder: Recorder) -> None:
    from engine import SamplingParams

    config = first_of("engine.config.sched:SchedulerConfig")
    make_scheduler = first_of(
        "engine.sched.plugins.find:make_scheduler", "engine.sched.find:make_scheduler"
    )
    manager = first_of("engine.kv.manager:KVManager")
    add_request = first_of("engine.messages.requests:AddRequest")
    worker = first_of("policylab.verify.fake:CountingWorker", "engine.verify.fake:CountingWorker")
    executor, scheduler = (
        worker(),
        make_scheduler(
            config(max_num_batched_tokens=BUDGET, max_num_seqs=4, max_model_len=1024),
            manager(1000, 16),
            clock=time.monotonic,
        ),
    )

    def add(name: str, first: int, length: int) -> Any:
        params = SamplingParams(max_tokens=100)
        prompt = list(range(first, first + length))
        return scheduler.add_request(
            add_request(name, prompt, params, max_tokens=100, seed=0, arrival_time=0.0)
        )

    def run(number: int) -> list[int]:
        with recorder.on(number):
            plan = scheduler.schedule()
        result = executor.collect(executor.launch(plan))
        with recorder.on(number):
            scheduler.update_from_output(plan, result)
        return sorted(plan.counts.tolist())

    add("decoding", 0, 8)
    run(0)
    for number in range(1, TIMES + 1):
        run(0)
        req = add(f"chunked {number}", 1000 * number, 3 * BUDGET)
        with recorder.on(number):
            scheduler.policy.rank(req, scheduler.view)
        assert run(number) == [1, BUDGET - 1], "no step of a decode and a chunk"
        scheduler.finish_requests(f"chunked {number}")


def abort(recorder: Recorder) -> None:
    asyncio.run(cancel_streams(recorder))


async def cancel_streams(recorder: Recorder) -> None:
    from engine import AsyncLLMEngine, EngineArgs, SamplingParams

    engine = AsyncLLMEngine.from_engine_args(
        EngineArgs(multiprocess=True, log_level="warning", disable_log_stats=True)
    )
    params = SamplingParams(max_tokens=400, ignore_eos=True)

    async def read(number: int, has_begun: asyncio.Event) -> None:
        async for _ in engine.generate("def f(x):", params, str(number)):
            has_begun.set()

    for number in range(1, TIMES + 1):
        has_begun = asyncio.Event()
        task = asyncio.create_task(read(number, has_begun))
        await has_begun.wait()
        await engine.pause()
        await asyncio.sleep(QUIET_SECONDS)
        with recorder.on(IDLE + number):
            await asyncio.sleep(IDLE_SECONDS)
        with recorder.on(number):
            task.cancel()
            await asyncio.sleep(QUIET_SECONDS)
        await asyncio.wait([task])
        await engine.resume()
    engine.shutdown()


def generate(recorder: Recorder) -> None:
    from engine import LLM, SamplingParams
    from engine.assets import BOX_MODEL

    llm = LLM(BOX_MODEL, log_level="warning", disable_log_stats=True)
    params = SamplingParams(max_tokens=1, temperature=0.0)
    for number in range(1, TIMES + 1):
        prompt = f"def function_{number}(x):"
        with recorder.on(number):
            llm.generate([prompt], params)


JOURNEYS: dict[str, Callable[[Recorder], None]] = {
    "step": step,
    "abort": abort,
    "generate": generate,
}


def compile_kernels() -> None:
    """Compile the kernels before calls are recorded, which would slow the compiler."""
    from engine import LLM, SamplingParams
    from engine.assets import BOX_MODEL

    llm = LLM(BOX_MODEL, log_level="warning", disable_log_stats=True)
    llm.generate(["def f(x):"], SamplingParams(max_tokens=2, temperature=0.0))
    llm.shutdown()


def take(name: str) -> list[str]:
    """Take a journey in this process and return its files."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "switch").write_bytes(b"\0")
        os.environ[SHARED] = folder
        recorder = Recorder(Path(folder))
        recorder.install()
        try:
            JOURNEYS[name](recorder)
        finally:
            sys.setprofile(None)
            threading.setprofile(None)
        files = files_of((Path(folder) / "notes").read_text().splitlines())
    return files if name == "generate" else [f for f in files if not f.startswith(WORKER)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="where to keep the files")
    parser.add_argument("--files", action="store_true", help="name the files of each journey")
    parser.add_argument("--only", choices=JOURNEYS, help="take this journey alone")
    options = parser.parse_args()
    names = [options.only] if options.only else list(JOURNEYS)
    if names != ["step"]:
        compile_kernels()
    found = {name: take(name) for name in names}
    for name, files in found.items():
        print(f"{name:<10} {len(files):>4} files")
        if options.files:
            print("".join(f"    {file}\n" for file in files), end="")
    if options.json is not None:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__mp_main__" and SHARED in os.environ:
    # A core in a process of its own imports this file first, as all spawned processes do.
    Recorder(Path(os.environ[SHARED])).install()

if __name__ == "__main__":
    main()
