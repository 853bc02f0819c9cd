"""The entry point of the command ``metronome``."""

from __future__ import annotations

from engine.cli.interrupts import Interrupts


def run() -> int:
    """Run the command line of this process and return its exit status."""
    interrupts = Interrupts.install()
    from engine.cli.main import main

    return interrupts.run(main)
