"""Traces of what a command makes the engine do."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from engine.config.args import EngineArgs
from engine.errors import EngineDeadError, EngineError
from engine.llm import LLM
from engine.llm_engine import LLMEngine


@contextmanager
def profiled(engine: LLM | LLMEngine, args: EngineArgs) -> Iterator[None]:
    """Record what happens meanwhile if there is a directory for traces, and say where they are."""
    if args.torch_profiler_dir is None:
        yield
        return
    engine.start_profile()
    yield
    try:
        for path in engine.stop_profile():
            print(f"trace: {path}", file=sys.stderr)
    except EngineDeadError:
        raise
    except EngineError as error:  # the work itself is done, and its result is not lost
        print(f"metronome: no trace: {error}", file=sys.stderr)
