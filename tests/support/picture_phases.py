"""Phases of a picture in which a process can die.

    decoding    the front end processes it
    travelling  its content is under way to the core
    encoding    the core is about to encode it
    encoded     the core has encoded it, and has computed nothing with it

    python picture_phases.py MODEL PHASE DIRECTORY [ADDRESS]

runs a front end, of its own core or of the one at an address, that comes to a phase and says so.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Event
from typing import Any

from engine.messages.requests import MediaItem
from engine.sched.policies.fcfs import FCFS

PHASES = ("decoding", "travelling", "encoding", "encoded")
GO_ON = "go on"
SIZE = (70, 71)  # in pixels, the picture that comes to a phase


class Halting(FCFS):
    """A policy that halts its core once when it comes to a phase: it makes a file of that name in
    the directory, and waits for one named ``GO_ON``."""

    def __init__(self, directory: str = "", phase: str = "") -> None:
        super().__init__()
        from engine.mm.encoding import ItemEncoder

        run = ItemEncoder.run

        def halting(encoder: Any, items: Sequence[MediaItem]) -> Any:
            if items and phase == "encoding":
                halt(Path(directory), phase)
            encoded = run(encoder, items)
            if items and phase == "encoded":
                halt(Path(directory), phase)
            return encoded

        ItemEncoder.run = halting  # type: ignore[method-assign]


def halt(directory: Path, phase: str) -> None:
    try:
        (directory / phase).touch(exist_ok=False)
    except FileExistsError:
        return
    while not (directory / GO_ON).exists():
        time.sleep(0.01)


class DecodingGate:
    """Holds up the processing of the picture, in this process."""

    def __init__(self, size: tuple[int, int] = SIZE) -> None:
        from engine.pictures.processing import ImageProcessor

        self.begun, self.opened = Event(), Event()
        make = ImageProcessor.pixels

        def pixels(processor: Any, image: Any) -> Any:
            if image.size == size:
                self.begun.set()
                self.opened.wait()
            return make(processor, image)

        self.restore: Callable[[], object] = lambda: setattr(ImageProcessor, "pixels", make)
        ImageProcessor.pixels = pixels  # type: ignore[method-assign]


def come_to(phase: str, engine: Any, directory: Path, gate: DecodingGate | None) -> list[Any]:
    """Step an engine until its picture is in a phase; the outputs that have ended meanwhile."""
    ended: list[Any] = []
    contents = engine.session.contents
    while True:
        ended += [each for each in engine.step() if each.finished]
        if phase == "decoding":
            assert gate is not None
            is_there = gate.begun.is_set()
        elif phase == "travelling":
            is_there = any(each.made is not None for each in vars(contents)["_contents"].values())
        else:
            is_there = (directory / phase).exists()
        if is_there:
            return ended


def main(model: str, phase: str, directory: str, address: str = "") -> None:
    from e2e.picture_cases import picture
    from e2e.test_pictures import GREEDY, SMALL, prompt_of

    from engine import LLM

    gate = DecodingGate() if phase == "decoding" else None
    policy = {"scheduling_policy": f"{__package__ or 'support'}.picture_phases.Halting"}
    own = {"multiprocess": True, "tokenizer_pool_size": 1 if phase != "decoding" else 0, **SMALL}
    own |= {**policy, "policy_options": {"directory": directory, "phase": phase}}
    llm = LLM(model, **({"core_address": address} if address else own))
    engine = llm.llm_engine
    engine.add_request("seeing", prompt_of("a <image>", [picture(*SIZE)]), GREEDY)
    engine.add_request("reading", "none", GREEDY)
    come_to(phase, engine, Path(directory), gate)
    if phase == "travelling":  # at once, perhaps before the core has read it
        print("ready", flush=True)
        os.kill(os.getpid(), signal.SIGKILL)
    print("ready", flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main(*sys.argv[1:])
